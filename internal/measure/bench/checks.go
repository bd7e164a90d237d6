//go:build linux

package bench

import (
	"context"
	"encoding/binary"
	"maps"
	"math"
	"runtime"
	"runtime/metrics"
	"slices"
	"time"

	"plimsoll/internal/base/activity"
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/measure/summary"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Targets of the checks: the largest acceptable results.
const (
	MostStopAdded        = time.Millisecond
	MostDenormalSlowdown = 1.1
)

// Checks measures properties that a good mean hides.
type Checks struct {
	Collections int // garbage collections forced while steps ran
	// Stops are the stops of the world in these collections. IdleStops are the same while no step ran. The difference
	// comes from the kernels: the world cannot stop before they return.
	Stops, IdleStops Stops
	// Denormal is the time of an update of denormal first moments, in units of an update of normal ones.
	Denormal summary.Spread
	Rounds   Rounds // of both checks
}

// Stops sums up stops of the world. A single stop may last as long as the host makes this process wait for a CPU. So
// the targets apply to nine in ten stops.
type Stops struct {
	NineInTen, Longest time.Duration
}

// StopAdded returns what steps add to the length of nine in ten stops of the world.
func (c Checks) StopAdded() time.Duration {
	return max(0, c.Stops.NineInTen-c.IdleStops.NineInTen)
}

// The time and the rounds in which collections are forced.
var collectingTime = 200 * time.Millisecond

const collectingRounds = 3

func (p *Suite) check(ctx context.Context, w watch, s *steps, repeats int) (*Checks, error) {
	c := &Checks{}
	type pair struct {
		collections   int
		running, idle histogram
	}
	stops, disturbed, err := rounds(ctx, w, collectingRounds, func() (p pair, err error) {
		_, p.idle = collecting(func() { time.Sleep(collectingTime) })
		p.collections, p.running = collecting(func() {
			for begin := time.Now(); time.Since(begin) < collectingTime; {
				s.engine.Step(1)
			}
		})
		return p, nil
	}, unseen{})
	if err != nil {
		return nil, err
	}
	c.Rounds.add(disturbed)
	all := pair{running: histogram{}, idle: histogram{}}
	for _, p := range stops {
		all.collections += p.collections
		all.running.add(p.running)
		all.idle.add(p.idle)
	}
	c.Collections, c.Stops, c.IdleStops = all.collections, all.running.stops(), all.idle.stops()
	ratios, disturbed, err := rounds(ctx, w, p.Rounds, func() (float64, error) {
		var normal, denormal time.Duration
		for range repeats {
			normal += s.updateOf(normalBits)
			denormal += s.updateOf(denormalBits)
		}
		return float64(denormal) / float64(normal), nil
	}, unseen{})
	if err != nil {
		return nil, err
	}
	c.Rounds.add(disturbed)
	c.Denormal = summary.Over(ratios, func(x float64) float64 { return x })
	return c, nil
}

// unseen is progress that is not shown.
type unseen struct{ activity.Progress }

func (unseen) Advance(int64) {}

// collecting forces one garbage collection after the other while a function runs. It returns their number and their
// stops of the world.
func collecting(during func()) (collections int, stops histogram) {
	stop, stopped := make(chan struct{}), make(chan struct{})
	before := allStops()
	go func() {
		defer close(stopped)
		for {
			runtime.GC() // at least once, on the busiest host
			collections++
			select {
			case <-stop:
				return
			default:
			}
		}
	}()
	during()
	close(stop)
	<-stopped
	stops = allStops()
	for bound, count := range before {
		stops[bound] -= count
	}
	return collections, stops
}

// histogram counts stops of the world by an upper bound of their length.
type histogram map[time.Duration]uint64

// allStops returns the stops for garbage collections since the process started.
func allStops() histogram {
	sample := []metrics.Sample{{Name: "/sched/pauses/total/gc:seconds"}}
	metrics.Read(sample)
	from, h := sample[0].Value.Float64Histogram(), histogram{}
	for i, count := range from.Counts {
		bound := from.Buckets[i+1]
		if math.IsInf(bound, 1) {
			bound = from.Buckets[i]
		}
		h[time.Duration(bound*float64(time.Second))] += count
	}
	return h
}

func (h histogram) add(other histogram) {
	for bound, count := range other {
		h[bound] += count
	}
}

// stops returns the upper bounds of nine in ten stops and of the longest stop.
func (h histogram) stops() Stops {
	var all, passed uint64
	for _, count := range h {
		all += count
	}
	var s Stops
	for _, bound := range slices.Sorted(maps.Keys(h)) {
		if h[bound] == 0 {
			continue
		}
		if 10*passed < 9*all {
			s.NineInTen = bound
		}
		passed += h[bound]
		s.Longest = bound
	}
	return s
}

// Bit patterns for first moments. A bf16 moment holds the upper half, and is as denormal as the fp32 moment.
const (
	normalBits   = 115 << 23 // 2^-12
	denormalBits = 4 << 16
	// smallestFloor is the least value in a header of int8 moments.
	smallestFloor = 64
)

// updateOf sets the first moment of all parameters to one number and times an update. Gradients are zero, as others
// would change the first moment.
func (s *steps) updateOf(bits uint32) time.Duration {
	for _, rank := range s.shards {
		rank.Each(func(_ shard.Chunk, c kernel.Chunk) { setFirstMoment(c, bits) })
	}
	return s.engine.Step(1).UpdateTime
}

func setFirstMoment(c kernel.Chunk, bits uint32) {
	moment := c.Moments[0]
	for i := range moment.Len() {
		switch moment.Type {
		case dtype.U8: // of the smallest blocks; no int8 moment is denormal
			moment.Data[i], c.Moments[1].Data[i] = 1, 1
			c.Headers[i/kernel.Block] = uint16(max(bits>>23, smallestFloor) | 20<<8)
		case dtype.BF16:
			binary.LittleEndian.PutUint16(moment.Data[2*i:], uint16(bits>>16))
		default:
			binary.LittleEndian.PutUint32(moment.Data[4*i:], bits)
		}
	}
	clear(c.Gradient.Data)
}
