//go:build linux

package binding_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/cpuset"
	"pgregory.net/rapid"

	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/machine/host/hosttest"
)

func cpus(t testing.TB, lists ...string) []cpuset.CPUSet {
	t.Helper()
	sets := []cpuset.CPUSet{}
	for _, list := range lists {
		set, err := host.ParseList(list)
		if err != nil {
			t.Fatal(err)
		}
		sets = append(sets, set)
	}
	return sets
}

// TestPeers uses masks that Slurm 22.05 gave on a machine numbered core by core. It has two sockets of four cores
// with two threads each.
func TestPeers(t *testing.T) {
	tests := []struct {
		name   string
		masks  []string
		want   []string // all CPUs of each rank
		reason string   // part of a reason of the second rank
	}{
		{"--cpu-bind=none", []string{"0-7", "0-7"}, []string{"0-3", "4-7"}, "2 cores of 4 usable"},
		{"a core cut in two", []string{"0-2", "3-5"}, []string{"0-2", "4-5"},
			"CPUs 2-3: cores also in its mask; they go to rank 0"},
		{"a core cut in two, in holes", []string{"2-5,8", "9,12-15"}, []string{"2-5,8", "12-15"},
			"inside its own affinity mask, 9,12-15"},
		{"--cpu-bind=cores", []string{"2-5,8-9", "8-9,12-15"}, []string{"2-5,8-9", "12-15"},
			"CPUs 8-9: cores also in its mask; they go to rank 0"},
		{"--hint=nomultithread", []string{"0,2", "4,6"}, []string{"0,2", "4,6"}, "2 cores of 4 usable"},
		{"cyclic", []string{"0-3", "8-11", "4-7", "12-15"}, []string{"0-3", "8-11", "4-7", "12-15"}, ""},
		{"one inside the other", []string{"0-7", "2-3"}, []string{"0-1,4-7", "2-3"}, "1 core of 4 usable"},
		{"a chain", []string{"0-3", "2-5", "4-5"}, []string{"0-1", "2-3", "4-5"}, ""},
		{"one way for each", []string{"0,2", "0", "2,4"}, []string{"2", "0", "4"}, ""},
		{"overlap", []string{"0-11", "4-15"}, []string{"0-7", "8-15"},
			"CPUs 4-7: cores also in its mask; they go to rank 0"},
		{"one core for both", []string{"0", "1"}, []string{"0", "1"}, "2 ranks share core 0-1"},
		{"a whole core for each", []string{"0,2-5", "1-3"}, []string{"0,4-5", "2-3"}, ""},
		{"a third in between", []string{"0-1", "2-3", "1-2"}, []string{"0-1", "2-3", "1"}, ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			m := hosttest.AdjacentGrid(2, 4, 2)
			m.Affinity = cpuset.New(0, 1) // of the one process that asks
			h := m.Discover(t)
			request := binding.Request{
				Ranks: len(test.masks), Peers: cpus(t, test.masks...),
				TrainerCores: binding.TrainerShare{Fraction: 0.99},
			}
			if problem := check(h, request); problem != "" {
				t.Error(problem)
			}
			// The trainer gets nearly all cores, since its masks show hardware threads. The optimizer keeps one core,
			// of which the mask shows the first thread.
			plan, err := binding.Split(h, request)
			if err != nil {
				t.Fatal(err)
			}
			got := []string{}
			for i, rank := range plan.Ranks {
				all := rank.TrainerCPUs
				for _, core := range h.Cores {
					if !core.Siblings.Intersection(rank.OptimizerCPUs).IsEmpty() {
						all = all.Union(core.Siblings.Intersection(request.Peers[i]))
					}
				}
				got = append(got, all.String())
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("CPUs: %s", diff)
			}
			if reasons := strings.Join(plan.Ranks[1].Reasons, "\n"); !strings.Contains(reasons, test.reason) {
				t.Errorf("reasons %q do not say %q", reasons, test.reason)
			}
		})
	}
}

// TestPeersAreEven compares the ranks' shares with every other way to give each core to one of the ranks that may use
// it: none is more even. The masks are arbitrary.
func TestPeersAreEven(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		small := func(name string, low, high int) int { return rapid.IntRange(low, high).Draw(t, name) }
		grid := hosttest.Grid
		if rapid.Bool().Draw(t, "adjacent") {
			grid = hosttest.AdjacentGrid
		}
		m := grid(small("sockets", 1, 2), small("cores", 1, 4), small("threads", 1, 2))
		h, err := host.Discover(m.Files, m.Affinity)
		if err != nil {
			t.Fatal(err)
		}
		request := binding.Request{Ranks: small("ranks", 1, 4), TrainerCores: binding.TrainerShare{Fraction: 0.5}}
		for range request.Ranks {
			mask := rapid.SliceOfN(rapid.SampledFrom(m.Affinity.List()), 1, 8).Draw(t, "mask")
			request.Peers = append(request.Peers, cpuset.New(mask...))
		}
		if problem := check(h, request); problem != "" {
			t.Fatalf("%+v: %s", request, problem)
		}
		plan, err := binding.Split(h, request)
		if err != nil {
			t.Fatal(err)
		}
		sizes, shared := make([]int, request.Ranks), 0
		for i, rank := range plan.Ranks {
			for _, core := range h.Cores {
				if !core.Siblings.Intersection(rank.TrainerCPUs.Union(rank.OptimizerCPUs)).IsEmpty() {
					sizes[i]++
				}
			}
			if ranksOf(h, plan)[i] > 1 {
				shared++
			}
		}
		best, oneEach := mostEven(h.Cores, request.Peers)
		if got := squares(sizes); oneEach && got != best || oneEach != (shared == 0) {
			t.Fatalf("%+v: %v, of squares %d; the most even has %d", request.Peers, sizes, got, best)
		}
	})
}

// mostEven tries all ways to give the cores away. It returns the least sum of squares of the ranks' numbers of cores,
// and whether some way leaves no rank without a core.
func mostEven(cores []host.Core, masks []cpuset.CPUSet) (best int, oneEach bool) {
	users := [][]int{}
	for _, core := range cores {
		ranks := []int{}
		for rank, mask := range masks {
			if !core.Siblings.Intersection(mask).IsEmpty() {
				ranks = append(ranks, rank)
			}
		}
		if len(ranks) > 0 {
			users = append(users, ranks)
		}
	}
	best = math.MaxInt
	sizes := make([]int, len(masks))
	var give func(core int)
	give = func(core int) {
		if core == len(users) {
			best, oneEach = min(best, squares(sizes)), oneEach || slices.Min(sizes) > 0
			return
		}
		for _, rank := range users[core] {
			sizes[rank]++
			give(core + 1)
			sizes[rank]--
		}
	}
	give(0)
	return best, oneEach
}

func squares(sizes []int) int {
	sum := 0
	for _, size := range sizes {
		sum += size * size
	}
	return sum
}

// TestPeersFollowGPUs: inside its mask a rank still gets the cores near its GPU.
func TestPeersFollowGPUs(t *testing.T) {
	h := hosttest.Grid(2, 4, 1).Discover(t)
	h.GPUs = []host.Device{{Address: "0000:01:00.0", CPUs: h.Nodes[1].CPUs},
		{Address: "0000:02:00.0", CPUs: h.Nodes[0].CPUs}}
	plan, err := binding.Split(h, binding.Request{Ranks: 2, GPUs: gpusOf(h, 2), Peers: cpus(t, "0-6", "1-7")})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"0,4-6", "1-3,7"} {
		if got := plan.Ranks[i].OptimizerCPUs.String(); got != want {
			t.Errorf("rank %d: got %s, want %s", i, got, want)
		}
	}
}
