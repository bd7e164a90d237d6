package bench

import (
	"context"
	"encoding/binary"
	"math"
	"runtime"
	"runtime/metrics"
	"slices"
	"time"

	"plimsoll/dtype"
	"plimsoll/optim/kernel"
	"plimsoll/rehearse"
)

// What the checks should find at most.
const (
	MostStopAdded        = time.Millisecond
	MostDenormalSlowdown = 1.1
)

// Checks are properties that a good mean does not show.
type Checks struct {
	Collections int // forced while steps ran
	// LongestStop is the longest stop of the world that these took, and
	// LongestIdleStop the same while no step ran. The difference is what
	// kernels add: the world cannot stop before they return.
	LongestStop, LongestIdleStop time.Duration
	// Denormal is the time of an update of denormal first moments, in units of
	// that of normal ones.
	Denormal Spread
	Rounds   Rounds // of both checks
}

// StopAdded is what steps add to the longest stop of the world.
func (c Checks) StopAdded() time.Duration { return max(0, c.LongestStop-c.LongestIdleStop) }

// Collections are forced for so long, in so many rounds.
const (
	collectingTime   = 200 * time.Millisecond
	collectingRounds = 3
)

func (p *Plan) check(ctx context.Context, w watch, s *steps, repeats int) (*Checks, error) {
	c := &Checks{}
	stops, disturbed, err := rounds(ctx, w, collectingRounds, func() (Checks, error) {
		_, idle := collecting(func() { time.Sleep(collectingTime) })
		collections, longest := collecting(func() {
			for begin := time.Now(); time.Since(begin) < collectingTime; {
				s.engine.Step(1)
			}
		})
		return Checks{Collections: collections, LongestStop: longest, LongestIdleStop: idle}, nil
	}, unseen{})
	if err != nil {
		return nil, err
	}
	c.Rounds.add(disturbed)
	for _, stop := range stops {
		c.Collections += stop.Collections
		c.LongestStop = max(c.LongestStop, stop.LongestStop)
		c.LongestIdleStop = max(c.LongestIdleStop, stop.LongestIdleStop)
	}
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
	c.Denormal = Over(ratios, func(x float64) float64 { return x })
	return c, nil
}

// unseen is progress that is not shown.
type unseen struct{ rehearse.Progress }

func (unseen) Advance(int64) {}

// collecting forces one garbage collection after the other while a function
// runs, and returns their number and the longest stop of the world.
func collecting(during func()) (collections int, longest time.Duration) {
	stop, stopped := make(chan struct{}), make(chan struct{})
	before := stops()
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				runtime.GC()
				collections++
			}
		}
	}()
	during()
	close(stop)
	<-stopped
	return collections, longestSince(before, stops())
}

// stops is the histogram of stops of the world for garbage collections.
func stops() *metrics.Float64Histogram {
	sample := []metrics.Sample{{Name: "/sched/pauses/total/gc:seconds"}}
	metrics.Read(sample)
	return sample[0].Value.Float64Histogram()
}

// longestSince is the upper bound of the last bucket that grew.
func longestSince(before, after *metrics.Float64Histogram) time.Duration {
	for i, count := range slices.Backward(after.Counts) {
		if count > before.Counts[i] {
			bound := after.Buckets[i+1]
			if math.IsInf(bound, 1) {
				bound = after.Buckets[i]
			}
			return time.Duration(bound * float64(time.Second))
		}
	}
	return 0
}

// What first moments are set to. A bf16 moment has the upper half, and is as
// denormal as the fp32 one.
const (
	normalBits   = 115 << 23 // 2^-12
	denormalBits = 4 << 16
	// smallestFloor is the least that a header of int8 moments can say.
	smallestFloor = 64
)

// updateOf sets the first moment of all parameters to one number and times an
// update. Gradients are zero, or the first moment would be what they make it.
func (s *steps) updateOf(bits uint32) time.Duration {
	s.shard.Each(func(_ int64, c kernel.Chunk) {
		moment := c.Moments[0]
		for i := range moment.Len() {
			switch moment.Type {
			case dtype.U8: // of the smallest blocks: none is denormal
				moment.Data[i], c.Moments[1].Data[i] = 1, 1
				c.Headers[i/kernel.Block] = uint16(max(bits>>23, smallestFloor) | 20<<8)
			case dtype.BF16:
				binary.LittleEndian.PutUint16(moment.Data[2*i:], uint16(bits>>16))
			default:
				binary.LittleEndian.PutUint32(moment.Data[4*i:], bits)
			}
		}
		clear(c.Gradient.Data)
	})
	return s.engine.Step(1).UpdateTime
}
