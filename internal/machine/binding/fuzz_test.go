//go:build linux

package binding_test

import (
	"os"
	"testing"

	"golang.org/x/tools/txtar"
	"k8s.io/utils/cpuset"

	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/machine/host/hosttest"
)

// FuzzSplit divides the host that discovery makes of a damaged machine. It must not panic, and every rank gets some
// CPUs, all of them its own.
func FuzzSplit(f *testing.F) {
	for _, name := range []string{"two-socket", "slurm", "container", "virtual-machine"} {
		data, err := os.ReadFile("../../../examples/machines/" + name + ".txtar")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, uint8(3), "0-2,6", "1,3-5", "0.5")
	}
	f.Fuzz(func(t *testing.T, data []byte, ranks uint8, first, second, share string) {
		files := hosttest.NewFiles(nil)
		for _, file := range txtar.Parse(data).Files {
			files.Set(file.Name, file.Data)
		}
		h, err := host.Discover(files, cpuset.New(0, 1, 2, 3, 70))
		if err != nil {
			return
		}
		request := binding.Request{Ranks: int(ranks%16) + 1}
		_ = request.TrainerCores.Set(share) // the zero value where share does not parse
		request.GPUs = binding.GPUsInOrder(h, request.Ranks)
		masks := []cpuset.CPUSet{}
		for _, text := range []string{first, second} {
			if mask, err := host.ParseList(text); err == nil {
				masks = append(masks, mask)
			}
		}
		for rank := range request.Ranks {
			if len(masks) > 0 {
				request.Peers = append(request.Peers, masks[rank%len(masks)])
			}
		}
		plan, err := binding.Split(h, request)
		if err != nil {
			return
		}
		for i, rank := range plan.Ranks {
			allowed := h.CPUs
			if request.Peers != nil {
				allowed = request.Peers[i].Intersection(h.Online)
			}
			optimizer := request.TrainerCores.Fraction < 1 // otherwise the trainer has all cores
			if rank.OptimizerCPUs.IsEmpty() == optimizer ||
				!rank.OptimizerCPUs.Union(rank.TrainerCPUs).IsSubsetOf(allowed) {
				t.Errorf("rank %+v of %q", rank, allowed)
			}
		}
	})
}
