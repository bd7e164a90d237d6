//go:build linux

package binding_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host/hosttest"
)

func TestMemory(t *testing.T) {
	for _, test := range []struct {
		machine []string
		ranks   int
		ask     string
		nodes   []int
		policy  string
		reason  string
	}{
		{[]string{"two-socket"}, 2, "", []int{0}, binding.PolicyPreferred, "memory on NUMA node 0, nearest"},
		{[]string{"two-socket"}, 1, "", []int{0, 1}, binding.PolicyInterleave, "interleaved over NUMA nodes 0-1"},
		{[]string{"two-socket"}, 1, binding.PolicyPreferred, []int{0, 1}, binding.PolicyPreferred,
			"preferred for NUMA nodes 0-1, as asked"},
		{[]string{"two-socket"}, 2, binding.PolicyDefault, []int{0}, binding.PolicyDefault,
			"default for NUMA node 0, as asked"},
		{[]string{"two-socket"}, 2, binding.PolicyBind, []int{0}, binding.PolicyBind,
			"when it needs more than 64.0 GiB"},
		// Node 0 is not allowed.
		{[]string{"two-socket", "container"}, 2, "", []int{1}, binding.PolicyPreferred, "NUMA node 1"},
		{[]string{"virtual-machine"}, 2, binding.PolicyBind, []int{0}, binding.PolicyDefault, "no memory policy"},
	} {
		names := []string{}
		for _, name := range test.machine {
			names = append(names, "../../../examples/machines/"+name+".txtar")
		}
		h := hosttest.ReadText(t, names...).Discover(t)
		plan, err := binding.Split(h, binding.Request{Ranks: test.ranks, MemoryPolicy: test.ask})
		if err != nil {
			t.Fatal(err)
		}
		rank := plan.Ranks[0]
		if diff := cmp.Diff(test.nodes, rank.NUMANodes); diff != "" || rank.MemoryPolicy != test.policy {
			t.Errorf("%v: policy %s, nodes %s", test.machine, rank.MemoryPolicy, diff)
		}
		if reasons := strings.Join(rank.Reasons, "\n"); !strings.Contains(reasons, test.reason) {
			t.Errorf("%v: reasons %q do not say %q", test.machine, reasons, test.reason)
		}
	}
}
