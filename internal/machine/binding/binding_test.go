//go:build linux

package binding_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/cpuset"
	"pgregory.net/rapid"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/machine/host/hosttest"
)

var sameCPUs = cmp.Comparer(cpuset.CPUSet.Equals)

// TestCorpus checks the invariants on every machine, restriction and request.
func TestCorpus(t *testing.T) {
	numbers := []int{1, 2, 3, 4, 8, 16}
	shares := []binding.TrainerShare{{}, {Cores: 2}, {Fraction: 0.5}, {Fraction: 0.75}}
	if testing.Short() {
		numbers, shares = []int{1, 3, 8}, []binding.TrainerShare{{}, {Cores: 2}, {Fraction: 0.75}}
	}
	machines := hosttest.Corpus(t)
	known := knownPlans()
	all := []hosttest.Machine{}
	for _, m := range machines {
		all = append(all, m.Machine)
	}
	for _, s := range hosttest.Scenarios(t, machines) {
		all = append(all, s.Machine)
	}
	for _, m := range all {
		h := m.Discover(t)
		plans := known[m.Name]
		if plans != nil {
			delete(known, m.Name)
			plan, err := binding.Split(h, binding.Request{Ranks: len(plans), GPUs: gpusOf(h, len(plans))})
			if err != nil {
				t.Fatal(err)
			}
			for i, rank := range plan.Ranks {
				if rank.OptimizerCPUs.String() != plans[i] {
					t.Errorf("%s rank %d: got %s, want %s", m.Name, i, rank.OptimizerCPUs, plans[i])
				}
			}
		}
		for _, ranks := range numbers {
			for _, share := range shares {
				for _, gpus := range [][]string{nil, gpusOf(h, ranks)} {
					request := binding.Request{Ranks: ranks, TrainerCores: share, GPUs: gpus}
					if problem := check(h, request); problem != "" {
						t.Errorf("%s %+v: %s", m.Name, request, problem)
					}
				}
			}
		}
	}
	if len(known) > 0 {
		t.Errorf("not in the corpus: %v", known)
	}
}

// knownPlans returns plans for machines of the corpus with one rank for each GPU.
func knownPlans() map[string][]string {
	return map[string][]string{
		// Each part of a GPU belongs to one cache; the parts are in another order than the caches.
		"tioga-mi250x": {"48-55", "56-63", "16-23", "24-31", "0-7", "8-15", "32-39", "40-47"},
		// The GPUs are on nodes 3, 1, 7 and 5; the nodes between them are shared out.
		"jureca-dc-gpu-nps4": {"32-63", "0-31", "96-127", "64-95"},
		"dual-l4-node":       {"0-15", "16-31"},
	}
}

// gpusOf assigns the host's GPUs to the ranks in turn.
func gpusOf(h *host.Host, ranks int) []string {
	if len(h.GPUs) == 0 {
		return nil
	}
	gpus := []string{}
	for rank := range ranks {
		gpus = append(gpus, h.GPUs[rank%len(h.GPUs)].Address)
	}
	return gpus
}

// TestGrids checks the same on machines of any regular shape, restricted to any affinity mask and quota.
func TestGrids(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		small := func(name string, low, high int) int { return rapid.IntRange(low, high).Draw(t, name) }
		m := hosttest.Grid(small("sockets", 1, 4), small("cores", 1, 9), small("threads", 1, 4))
		affinity := rapid.SliceOfN(rapid.SampledFrom(m.Affinity.List()), 1, m.Affinity.Size()).Draw(t, "affinity")
		h, err := host.Discover(m.Files, cpuset.New(affinity...))
		if err != nil {
			t.Fatal(err)
		}
		h.Quota = rapid.SampledFrom([]float64{0, 0, 0.5, 3.5, 16}).Draw(t, "quota")
		for _, node := range h.Nodes { // some GPUs, on some of the nodes
			for i := range small("gpus", 0, 3) {
				h.GPUs = append(h.GPUs, host.Device{Address: fmt.Sprintf("0000:%02x:%02x.0", node.ID, i),
					CPUs: node.CPUs})
			}
		}
		ranks := small("ranks", 1, 20)
		request := binding.Request{Ranks: ranks, GPUs: gpusOf(h, ranks)}
		switch small("trainer", 0, 2) {
		case 1:
			request.TrainerCores.Cores = small("trainer cores", 1, 12)
		case 2:
			request.TrainerCores.Fraction = rapid.Float64Range(0.01, 0.99).Draw(t, "fraction")
		}
		if problem := check(h, request); problem != "" {
			t.Fatalf("%+v: %s", request, problem)
		}
	})
}

// TestReportedMasks uses the two masks of DeepSpeed issue 7478, with which ZeRO offload could not be bound: two ranks
// on each mask, and one rank for each mask.
func TestReportedMasks(t *testing.T) {
	masks := cpus(t, "0,4-11,21-26,30-46", "64,97-127")
	for _, m := range []hosttest.Machine{hosttest.Grid(2, 64, 1), hosttest.Grid(2, 64, 2),
		hosttest.AdjacentGrid(2, 32, 2)} {
		for _, peers := range [][]cpuset.CPUSet{{masks[0], masks[0]}, {masks[1], masks[1]}, masks} {
			request := binding.Request{Ranks: 2, Peers: peers, TrainerCores: binding.DefaultTrainerShare}
			h := m.Discover(t)
			if problem := check(h, request); problem != "" {
				t.Errorf("%s, %v: %s", m.Name, peers, problem)
			}
			plan, err := binding.Split(h, request)
			if err != nil {
				t.Fatal(err)
			}
			total, all := 0, cpuset.New()
			for _, rank := range plan.Ranks {
				for _, role := range []cpuset.CPUSet{rank.TrainerCPUs, rank.OptimizerCPUs} {
					if role.IsEmpty() || rank.Shared {
						t.Errorf("%s, %v: rank %+v", m.Name, peers, rank)
					}
					total, all = total+role.Size(), all.Union(role)
				}
			}
			if all.Size() != total {
				t.Errorf("%s, %v: a CPU has two roles: %+v", m.Name, peers, plan)
			}
		}
	}
}

// TestAnyMachine checks the same on machines of irregular shape: caches within nodes or nodes within caches, cores of
// one or two threads and of one or two kinds, sparse ids in any order.
func TestAnyMachine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		small := func(name string, low, high int) int { return rapid.IntRange(low, high).Draw(t, name) }
		ids := rapid.Permutation(slices.Collect(func(yield func(int) bool) {
			for id := range 512 {
				if !yield(2 * id) {
					return
				}
			}
		})).Draw(t, "ids")
		cachesInNodes, kinds, mixed := rapid.Bool().Draw(t, "caches in nodes"), small("kinds", 1, 2),
			rapid.Bool().Draw(t, "mixed")
		cores, outer, inner := []hosttest.Core{}, 0, 0
		for socket := range small("packages", 1, 3) {
			for range small("outer groups", 1, 3) {
				outer++
				for range small("inner groups", 1, 3) {
					inner++
					threads := small("threads", 1, 2)
					for range small("cores", 1, 5) {
						core := hosttest.Core{Package: 7 * socket, Node: 3 * outer, Cache: inner, Capacity: 1024}
						if !cachesInNodes {
							core.Node, core.Cache = 3*inner, outer
						}
						if kinds == 2 {
							core.Capacity = rapid.SampledFrom([]int{1024, 512}).Draw(t, "capacity")
						}
						if mixed {
							threads = small("threads", 1, 2)
						}
						core.CPUs, ids = ids[:threads], ids[threads:]
						cores = append(cores, core)
					}
				}
			}
		}
		m := hosttest.Build("any", cores)
		mask := m.Affinity
		if rapid.Bool().Draw(t, "restricted") {
			mask = cpuset.New(rapid.SliceOfN(rapid.SampledFrom(m.Affinity.List()), 1, m.Affinity.Size()).Draw(t,
				"affinity")...)
		}
		h, err := host.Discover(m.Files, mask)
		if err != nil {
			t.Fatal(err)
		}
		for _, node := range h.Nodes {
			if rapid.Bool().Draw(t, "GPU") {
				h.GPUs = append(h.GPUs, host.Device{Address: fmt.Sprintf("0000:%02x:00.0", node.ID), CPUs: node.CPUs})
			}
		}
		ranks := small("ranks", 1, 20)
		request := binding.Request{Ranks: ranks, TrainerCores: binding.DefaultTrainerShare}
		if rapid.Bool().Draw(t, "with GPUs") {
			request.GPUs = gpusOf(h, ranks)
		}
		if problem := check(h, request); problem != "" {
			t.Fatalf("%+v: %s", request, problem)
		}
	})
}

// TestPlans compares with plans that are known to be right.
func TestPlans(t *testing.T) {
	type request = binding.Request
	tests := []struct {
		name    string
		machine []string
		request request
		trainer []string
		workers []string
		reason  string // part of a reason of the first rank
	}{
		{"a socket each", []string{"two-socket"}, request{Ranks: 2}, nil, []string{"0-2", "3-5"},
			"3 cores of 6 usable"},
		{"GPUs decide", []string{"two-socket"},
			request{Ranks: 2, GPUs: []string{"0000:b1:00.0", "0000:17:00.0"}}, nil, []string{"3-5", "0-2"},
			"3 of its cores near GPU 0000:b1:00.0"},
		{"both ranks on one GPU", []string{"two-socket"},
			request{Ranks: 2, GPUs: []string{"0000:17:00.0", "0000:17:00.0"}}, nil, []string{"0-1,3", "2,4-5"},
			"2 of its cores near"},
		{"roles", []string{"two-socket"}, request{Ranks: 2, TrainerCores: binding.TrainerShare{Cores: 1}},
			[]string{"0,6", "3,9"}, []string{"1-2", "4-5"}, ""},
		{"half of each socket", []string{"two-socket"},
			request{Ranks: 1, TrainerCores: binding.TrainerShare{Fraction: 0.34}},
			[]string{"0,3,6,9"}, []string{"1-2,4-5"}, ""},
		{"too much for the trainer", []string{"two-socket"},
			request{Ranks: 2, TrainerCores: binding.TrainerShare{Cores: 9}},
			[]string{"0-1,6-7", "3-4,9-10"}, []string{"2", "5"}, "9 cores asked for the trainer, 2 given"},
		{"Slurm, half cores and a quota of 2.5", []string{"two-socket", "slurm"}, request{Ranks: 2},
			nil, []string{"3", "4"}, "quota of 2.5 (cgroup /slurm/job_7 cpu.cfs_quota_us) is enough for 1 core"},
		{"a quota spreads workers over the sockets", []string{"two-socket", "container"}, request{Ranks: 1},
			nil, []string{"0-1,3"}, "enough for 3 cores"},
		{"more ranks than cores", []string{"virtual-machine"}, request{Ranks: 3},
			nil, []string{"0", "1", "0"}, "2 usable cores for 3 ranks: 2 ranks share core 0"},
		{"one core for two roles", []string{"virtual-machine"},
			request{Ranks: 2, TrainerCores: binding.TrainerShare{Fraction: 0.5}},
			[]string{"0", "1"}, []string{"0", "1"}, "trainer and optimizer share it"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			names := []string{}
			for _, name := range test.machine {
				names = append(names, "../../../examples/machines/"+name+".txtar")
			}
			h := hosttest.ReadText(t, names...).Discover(t)
			if problem := check(h, test.request); problem != "" {
				t.Error(problem)
			}
			plan, err := binding.Split(h, test.request)
			if err != nil {
				t.Fatal(err)
			}
			var trainer, workers []string
			for _, rank := range plan.Ranks {
				if !rank.TrainerCPUs.IsEmpty() {
					trainer = append(trainer, rank.TrainerCPUs.String())
				}
				workers = append(workers, rank.OptimizerCPUs.String())
			}
			if diff := cmp.Diff(test.trainer, trainer); diff != "" {
				t.Errorf("trainer: %s", diff)
			}
			if diff := cmp.Diff(test.workers, workers); diff != "" {
				t.Errorf("optimizer: %s", diff)
			}
			if reasons := strings.Join(plan.Ranks[0].Reasons, "\n"); !strings.Contains(reasons, test.reason) {
				t.Errorf("reasons %q do not say %q", reasons, test.reason)
			}
		})
	}
}

func TestBadRequests(t *testing.T) {
	h := hosttest.ReadText(t, "../../../examples/machines/two-socket.txtar").Discover(t)
	for _, test := range []struct {
		request binding.Request
		want    string
	}{
		{binding.Request{}, "0 ranks"},
		{binding.Request{Ranks: 1, TrainerCores: binding.TrainerShare{Cores: -1}}, "-1 cores"},
		{binding.Request{Ranks: 1, TrainerCores: binding.TrainerShare{Fraction: 1.5}}, "share is 1.5"},
		{binding.Request{Ranks: 1, TrainerCores: binding.TrainerShare{Fraction: math.NaN()}}, "share is NaN"},
		{binding.Request{Ranks: 1, TrainerCores: binding.TrainerShare{Cores: 1, Fraction: 0.5}}, "twice"},
		{binding.Request{Ranks: 2, GPUs: []string{"0000:17:00.0"}}, "1 GPU for 2 ranks"},
		{binding.Request{Ranks: 1, MemoryPolicy: "local"}, `"local" is no memory policy`},
		{binding.Request{Ranks: 1 << 30}, "1073741824 ranks"},
		{binding.Request{Ranks: 2, Peers: []cpuset.CPUSet{cpuset.New(0)}}, "1 affinity mask for 2 ranks"},
		{binding.Request{Ranks: 2, Peers: []cpuset.CPUSet{cpuset.New(0), cpuset.New(64)}},
			"mask \"64\" of rank 1 is online"},
		{binding.Request{Ranks: 1, GPUs: []string{"0000:17:00.1"}}, "did you mean 0000:17:00.0?"},
		{binding.Request{Ranks: 1, GPUs: []string{"mlx5_0"}}, "this host has the GPUs 0000:17:00.0, 0000:b1:00.0"},
	} {
		_, err := binding.Split(h, test.request)
		input, ok := err.(*fault.Input)
		if !ok || !strings.Contains(input.Error(), test.want) || input.Hint == "" {
			t.Errorf("%+v: error %v, want %q and a hint", test.request, err, test.want)
		}
	}
}

// TestLarge limits the CPU time of discovery and binding of 2,048 CPUs. Wall time would depend on other programs. It
// takes the best of some attempts.
func TestLarge(t *testing.T) {
	if testing.Short() {
		t.Skip("measures time")
	}
	m := hosttest.Grid(32, 32, 2)
	best, most := time.Hour, time.Duration(100*hosttest.Slowness(t)*float64(time.Millisecond))
	for range 10 {
		start := hosttest.CPUTime(t)
		plan, err := binding.Split(m.Discover(t), binding.Request{Ranks: 16, TrainerCores: binding.DefaultTrainerShare})
		best = min(best, hosttest.CPUTime(t)-start)
		if err != nil || plan.Ranks[15].OptimizerCPUs.Size() != 32 {
			t.Fatalf("plan %v, error %v", plan, err)
		}
	}
	if best > most {
		t.Errorf("takes %v of CPU time, expected %v at most", best, most)
	}
}

func BenchmarkDiscoverAndSplit2048(b *testing.B) {
	m := hosttest.Grid(32, 32, 2)
	for b.Loop() {
		if _, err := binding.Split(m.Discover(b),
			binding.Request{Ranks: 16, TrainerCores: binding.TrainerShare{Fraction: 0.5}}); err != nil {
			b.Fatal(err)
		}
	}
}

// TestAddresses: tools write PCI addresses in several ways.
func TestAddresses(t *testing.T) {
	h := hosttest.ReadText(t, "../../../examples/machines/two-socket.txtar").Discover(t)
	for _, address := range []string{"0000:b1:00.0", "B1:00.0", "00000000:B1:00.0"} {
		plan, err := binding.Split(h, binding.Request{Ranks: 2, GPUs: []string{address, ""}})
		if err != nil || plan.Ranks[0].OptimizerCPUs.String() != "3-5" {
			t.Errorf("%s: %+v, %v", address, plan, err)
		}
	}
}

// TestNestedNeighbours: a GPU near only some of the CPUs that another GPU is near comes first.
func TestNestedNeighbours(t *testing.T) {
	h := hosttest.Grid(2, 8, 1).Discover(t)
	h.GPUs = []host.Device{
		{Address: "0000:01:00.0", CPUs: h.Nodes[0].CPUs},
		{Address: "0000:02:00.0", CPUs: cpuset.New(0, 1, 2, 3)},
	}
	plan, err := binding.Split(h, binding.Request{Ranks: 2, GPUs: gpusOf(h, 2)})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"4-7,12-15", "0-3,8-11"} {
		if got := plan.Ranks[i].OptimizerCPUs.String(); got != want {
			t.Errorf("rank %d: got %s, want %s", i, got, want)
		}
	}
}

// TestFewestGroupsAreCut: where each rank can have whole nodes of its own, only the remaining nodes are cut.
func TestFewestGroupsAreCut(t *testing.T) {
	for _, c := range []struct {
		machine    hosttest.Machine
		ranks, cut int
	}{
		{hosttest.AdjacentGrid(4, 8, 1), 3, 1},
		{hosttest.AdjacentGrid(4, 6, 1), 3, 1},
		{hosttest.Grid(4, 5, 2), 3, 1},
		{hosttest.AdjacentGrid(8, 8, 1), 6, 2},
		{hosttest.AdjacentGrid(8, 8, 1), 5, 3},
		{hosttest.AdjacentGrid(4, 8, 1), 4, 0},
		{hosttest.AdjacentGrid(4, 8, 1), 2, 0},
		{hosttest.AdjacentGrid(2, 9, 1), 3, 2}, // no rank has room for a whole node
	} {
		h := c.machine.Discover(t)
		plan, err := binding.Split(h, binding.Request{Ranks: c.ranks})
		if err != nil {
			t.Fatal(err)
		}
		cut := 0
		for _, node := range h.Nodes {
			sharers := 0
			for _, rank := range plan.Ranks {
				if !rank.OptimizerCPUs.Intersection(node.CPUs).IsEmpty() {
					sharers++
				}
			}
			if sharers > 1 {
				cut++
			}
		}
		if problem := check(h, binding.Request{Ranks: c.ranks}); cut != c.cut || problem != "" {
			t.Errorf("%s, %d ranks: %d nodes are cut, want %d; %s", c.machine.Name, c.ranks, cut, c.cut, problem)
		}
	}
}

// TestReserve leaves cores to the system: the slowest first, one of each node in turn, and never the last core of a
// rank.
func TestReserve(t *testing.T) {
	slow := []hosttest.Core{}
	for core := range 6 {
		capacity := 1024
		if core >= 4 {
			capacity = 400
		}
		slow = append(slow, hosttest.Core{CPUs: []int{core}, Capacity: capacity})
	}
	for _, c := range []struct {
		name    string
		machine hosttest.Machine
		request binding.Request
		want    string // the remaining CPUs; empty for a refusal
	}{
		{"none", hosttest.Grid(2, 4, 2), binding.Request{Ranks: 2}, "0-15"},
		{"one", hosttest.Grid(2, 4, 2), binding.Request{Ranks: 2, Reserve: 1}, "1-7,9-15"},
		{"one of each node", hosttest.Grid(2, 4, 2), binding.Request{Ranks: 2, Reserve: 2}, "1-3,5-7,9-11,13-15"},
		{"a slow one", hosttest.Build("slow", slow), binding.Request{Ranks: 2, Reserve: 1}, "0-3,5"},
		{"all but one for each rank", hosttest.Grid(1, 4, 1), binding.Request{Ranks: 2, Reserve: 2}, "2-3"},
		{"too many", hosttest.Grid(1, 4, 1), binding.Request{Ranks: 2, Reserve: 3}, ""},
		{"fewer than none", hosttest.Grid(1, 4, 1), binding.Request{Ranks: 2, Reserve: -1}, ""},
		{"not the only one of a rank", hosttest.Grid(1, 4, 1),
			binding.Request{Ranks: 2, Reserve: 1, Peers: []cpuset.CPUSet{cpuset.New(0), cpuset.New(1, 2, 3)}}, "0,2-3"},
		{"the only ones", hosttest.Grid(1, 4, 1),
			binding.Request{Ranks: 2, Reserve: 1, Peers: []cpuset.CPUSet{cpuset.New(0), cpuset.New(1)}}, ""},
	} {
		c.request.TrainerCores = binding.WholeTrainerShare
		plan, err := binding.Split(c.machine.Discover(t), c.request)
		got := cpuset.New()
		for rank := range c.request.Ranks {
			if err == nil {
				got = got.Union(plan.Ranks[rank].TrainerCPUs)
			}
		}
		var input *fault.Input
		if got.String() != c.want || c.want == "" &&
			(!errors.As(err, &input) || !strings.Contains(err.Error(), "--reserve")) {
			t.Errorf("%s: CPUs %s are left (%v), want %q", c.name, got, err, c.want)
		}
	}
}

// TestOneThreadPerCore leaves the other hardware threads idle, for the trainer and for the optimizer.
func TestOneThreadPerCore(t *testing.T) {
	request := binding.Request{Ranks: 2, TrainerCores: binding.DefaultTrainerShare, OneThreadPerCore: true}
	plan, err := binding.Split(hosttest.Grid(2, 4, 2).Discover(t), request)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []struct{ trainer, optimizer string }{{"0-1", "2-3"}, {"4-5", "6-7"}} {
		r := plan.Ranks[i]
		if r.TrainerCPUs.String() != want.trainer || r.OptimizerCPUs.String() != want.optimizer ||
			r.OMPNumThreads != 2 {
			t.Errorf("rank %d: trainer %s, optimizer %s, %d threads", i, r.TrainerCPUs, r.OptimizerCPUs,
				r.OMPNumThreads)
		}
	}
}

// TestOneTeamOneSpeed: the threads of an OpenMP loop wait for the slowest thread. The trainer gets fast cores, the
// optimizer the slow ones.
func TestOneTeamOneSpeed(t *testing.T) {
	hybrid := func(fast, slow, capacity int) hosttest.Machine {
		cores := []hosttest.Core{}
		for cpu := range fast + slow {
			core := hosttest.Core{CPUs: []int{cpu}, Capacity: 1000}
			if cpu >= fast {
				core.Capacity = capacity
			}
			cores = append(cores, core)
		}
		return hosttest.Build("hybrid", cores)
	}
	cores := func(n int) binding.TrainerShare { return binding.TrainerShare{Cores: n} }
	for _, c := range []struct {
		name               string
		machine            hosttest.Machine
		share              binding.TrainerShare
		trainer, optimizer string
		threads            int
		says               string
	}{
		{"half of 6 and 8", hybrid(6, 8, 600), binding.DefaultTrainerShare, "0-5", "6-13", 6, "cores of one speed"},
		{"half of 8 and 4", hybrid(8, 4, 600), binding.DefaultTrainerShare, "0-5", "6-11", 6, "cores of one speed"},
		{"many slow ones do more", hybrid(2, 10, 600), binding.DefaultTrainerShare, "0-5", "6-11", 6,
			"4 of the trainer's cores are slower"},
		{"as many as asked for", hybrid(4, 4, 500), cores(6), "0-5", "6-7", 6, "2 of the trainer's cores are slower"},
		{"all, where the fast do more", hybrid(8, 4, 500), binding.WholeTrainerShare, "0-11", "", 8,
			"8 OpenMP threads for the trainer"},
		{"all, where all do more", hybrid(6, 8, 600), binding.WholeTrainerShare, "0-13", "", 14,
			"all cores are the trainer's"},
	} {
		plan, err := binding.Split(c.machine.Discover(t), binding.Request{Ranks: 1, TrainerCores: c.share})
		if err != nil {
			t.Fatal(err)
		}
		r := plan.Ranks[0]
		if r.TrainerCPUs.String() != c.trainer || r.OptimizerCPUs.String() != c.optimizer ||
			r.OMPNumThreads != c.threads ||
			!strings.Contains(strings.Join(r.Reasons, "\n"), c.says) {
			t.Errorf("%s: trainer %s, optimizer %s, %d threads, %q", c.name, r.TrainerCPUs, r.OptimizerCPUs,
				r.OMPNumThreads, r.Reasons)
		}
	}
}
