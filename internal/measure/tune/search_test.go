//go:build linux

package tune

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

// simulated is a machine that was never built: how its memory serves cores, and how its trainer uses them.
type simulated struct {
	name string
	// nodes are NUMA nodes. The optimizer's workers are spread over them, one core of each in turn.
	nodes []simulatedNode
	// falls is the share of bandwidth that each core beyond the knee of all nodes costs.
	falls float64
	// forward is a trainer's time with one core: launching kernels takes the same time with any number of cores, and
	// parallel work is divided among them.
	launching, parallel float64
	// own is how many cores the trainer wants for itself: with fewer, its threads take turns.
	own   int
	noise float64
}

type simulatedNode struct {
	cores     int
	bandwidth float64 // GB/s of all cores
	core      float64 // GB/s of one core
	soft      bool    // approaches the limit smoothly
}

func (m simulated) cores() (sum int) {
	for _, n := range m.nodes {
		sum += n.cores
	}
	return sum
}

// update is the time of an update that moves 10 GB.
func (m simulated) update(cores int) float64 {
	busy := make([]int, len(m.nodes))
	for left := cores; left > 0; {
		for i := range m.nodes {
			if busy[i] < m.nodes[i].cores && left > 0 {
				busy[i]++
				left--
			}
		}
	}
	rate, knee := 0.0, 0.0
	for i, n := range m.nodes {
		demand := float64(busy[i]) * n.core
		knee += n.bandwidth / n.core
		if n.soft {
			rate += n.bandwidth * (1 - math.Exp(-demand/n.bandwidth))
		} else {
			rate += min(demand, n.bandwidth)
		}
	}
	if beyond := float64(cores) - knee; beyond > 0 {
		rate *= math.Pow(1-m.falls, beyond)
	}
	return 10 / rate
}

// trainer is the time of forward and backward.
func (m simulated) trainer(cores int) float64 {
	turns := max(1, float64(m.own)/float64(cores))
	return m.launching*turns + m.parallel/float64(cores)
}

// noisy takes samples of a time. In one of thirty something else takes half of the machine.
func (m simulated) noisy(of func(cores int) float64, random *rand.Rand, count *int) Measure {
	return func(cores int, enough func([]float64) bool) (samples []float64, _ error) {
		*count++
		for !enough(samples) {
			sample := of(cores) * math.Exp(m.noise*random.NormFloat64())
			if random.IntN(30) == 0 {
				sample *= 1.5
			}
			samples = append(samples, sample)
		}
		return samples, nil
	}
}

// hosts are as large, and as fast, as the machines they are named for. Bandwidths are those of the memory's data sheets
// times 0.8, and those of a core are between 8 and 25 GB/s.
func hosts() []simulated {
	twice := func(n simulatedNode) []simulatedNode { return []simulatedNode{n, n} }
	sixth := simulatedNode{cores: 32, bandwidth: 95, core: 9}
	return []simulated{
		{name: "desktop with one RTX 4090, 16 cores", nodes: []simulatedNode{{16, 70, 22, false}}},
		{name: "two cores of a virtual machine", nodes: []simulatedNode{{2, 90, 28, false}}},
		{name: "8 x H100, 2 x 56 cores, SMT siblings idle", nodes: twice(simulatedNode{56, 245, 12, true})},
		{name: "a rank of 8 on it", nodes: []simulatedNode{{14, 61, 12, true}}},
		{name: "GH200, 72 cores", nodes: []simulatedNode{{72, 410, 18, false}}},
		{name: "half of a GB300, 72 cores", nodes: []simulatedNode{{72, 400, 25, true}}},
		{name: "2 x 6972P", nodes: []simulatedNode{sixth, sixth, sixth, sixth, sixth, sixth}},
		{name: "unequal nodes", nodes: []simulatedNode{{24, 150, 14, false}, {8, 150, 14, false}}},
		{name: "node without DIMMs", nodes: []simulatedNode{{16, 80, 11, true}, {16, 20, 11, true}}},
		{name: "four cores of a container", nodes: []simulatedNode{{4, 200, 13, false}}},
	}
}

// machines are fifty variants of them, in which trainers, noise and the plateau beyond the knee differ.
func machines() (all []simulated) {
	for i, host := range hosts() {
		for variant, v := range []struct {
			falls, launching, parallel float64
			own                        int
		}{
			{launching: 1, own: 1},                  // launches only
			{falls: 0.004, launching: 1, own: 2},    // the memory slows down beyond the knee
			{launching: 0.6, parallel: 0.4, own: 1}, // forward and backward on the CPU in part
			{falls: 0.015, launching: 1, own: 4},    // NCCL, watchdog and autograd have threads of their own
			{launching: 0.2, parallel: 0.8, own: 1}, // training on the CPU
		} {
			host.name = fmt.Sprintf("%s, variant %d", hosts()[i].name, variant)
			host.falls, host.own = v.falls, v.own
			// Forward and backward take as long as an update where they have all cores.
			full := v.launching + v.parallel/float64(host.cores())
			whole := host.update(host.cores())
			host.launching, host.parallel = whole*v.launching/full, whole*v.parallel/full
			host.noise = 0.02 + 0.03*float64((i+variant)%4)/3
			all = append(all, host)
		}
	}
	return all
}

func sum(update, trainer float64) float64 { return update + trainer }

// TestSearchFindsTheBestSplit holds the search against an exhaustive sweep without noise.
func TestSearchFindsTheBestSplit(t *testing.T) {
	all := machines()
	if len(all) != 50 {
		t.Fatalf("%d machines", len(all))
	}
	worst := 0.0
	for i, m := range all {
		for _, shares := range []bool{true, false} {
			for seed := range uint64(4) {
				step := func(cores int) float64 {
					return sum(m.update(cores), m.trainer((&Search{Cores: m.cores()}).trainerCores(cores)))
				}
				least := math.Inf(1)
				last := m.cores() - 1
				if shares {
					last++
				}
				for cores := 1; cores <= last; cores++ {
					least = min(least, step(cores))
				}
				random, measured, trained := rand.New(rand.NewPCG(seed, uint64(i))), 0, 0
				never := func() bool { return false }
				search := Search{
					Cores: m.cores(), Step: sum, Shares: shares,
					Update:  NewCurve(m.noisy(m.update, random, &measured), mostPoints, never),
					Trainer: NewCurve(m.noisy(m.trainer, random, &trained), mostRuns, never),
				}
				choice, err := search.Choose()
				if err != nil {
					t.Fatal(err)
				}
				lost := step(choice.Optimizer)/least - 1
				worst = max(worst, lost)
				if lost > 0.05 {
					t.Errorf("%s, shares %t, seed %d: %d of %d cores take %.1f %% longer than the best", m.name, shares,
						seed, choice.Optimizer, m.cores(), 100*lost)
				}
				if bound := 6 + 4*int(math.Log2(float64(m.cores()))); measured > bound || trained > mostRuns {
					t.Errorf("%s: %d updates and %d trainers were measured, expected at most %d and %d", m.name,
						measured, trained, bound, mostRuns)
				}
			}
		}
	}
	t.Logf("at worst %.1f %% longer than the best", 100*worst)
}
