//go:build linux

package view

import (
	"fmt"
	"slices"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// limit is something that may run out.
type limit struct {
	name     string
	free, of ledger.Bytes
	// apart is set if only some memory counts: it is not the headroom of the job.
	apart  bool
	recent []point // of the last window, oldest first
	seen   bool    // in the last sample
}

type point struct {
	at   time.Duration
	free ledger.Bytes
}

// What a warning is made from.
const (
	window      = time.Minute      // growth is that of the last window
	leastWindow = 20 * time.Second // growth over less time says little
	soon        = 10 * time.Minute // a limit that is reached within is worth a warning
	lowShare    = 20               // as is one of which less than a twentieth is left
	noiseShare  = 200              // a change of less than a two-hundredth of the limit is no growth
)

func (s *State) addLimits(at time.Duration, sample *samples.Sample) {
	for _, l := range s.limits {
		l.seen = false
	}
	s.limited("the memory of the host", at, sample.Node.Available, sample.Node.Memory, false)
	for _, group := range sample.Groups {
		if free, limited := group.Headroom(); limited {
			s.limited("the limit of "+clean(group.Name), at, free, group.Limit, false)
		}
	}
	for i := range sample.Processes {
		if p := &sample.Processes[i]; p.AddressSpaceLimit > 0 {
			s.limited(fmt.Sprintf("the address space of process %d", p.PID), at, p.AddressSpaceLimit-p.Virtual,
				p.AddressSpaceLimit, false)
		}
	}
	if shm := sample.Node.SharedFiles; shm.Size > 0 {
		s.limited("/dev/shm", at, shm.Size-shm.Used, shm.Size, true)
	}
	s.limits = slices.DeleteFunc(s.limits, func(l *limit) bool { return !l.seen })
	if s.swap == nil {
		s.swap = &limit{}
	}
	s.swap.set(at, sample.Node.SwapFree, sample.Node.SwapTotal)
}

func (s *State) limited(name string, at time.Duration, free, of ledger.Bytes, apart bool) {
	i := slices.IndexFunc(s.limits, func(l *limit) bool { return l.name == name })
	if i < 0 {
		i = len(s.limits)
		s.limits = append(s.limits, &limit{name: name, apart: apart})
	}
	s.limits[i].set(at, free, of)
}

func (l *limit) set(at time.Duration, free, of ledger.Bytes) {
	l.free, l.of, l.seen = free, of, true
	l.recent = slices.DeleteFunc(l.recent, func(p point) bool { return p.at < at-window })
	l.recent = append(l.recent, point{at, free})
}

// taken returns how much was taken in the window, and whether that is growth: more than noise in both of its halves.
func (l *limit) taken() (b ledger.Bytes, grows bool) {
	b = l.recent[0].free - l.free
	middle := l.recent[len(l.recent)/2].free
	least := l.of / noiseShare / 2
	return b, l.span() >= leastWindow && l.recent[0].free-middle > least && middle-l.free > least
}

func (l *limit) span() time.Duration { return l.recent[len(l.recent)-1].at - l.recent[0].at }

// fullIn returns when nothing is left at the growth of the last window: the slope of the line with the least squares.
// It returns 0 if there is no growth.
func (l *limit) fullIn() time.Duration {
	if _, grows := l.taken(); !grows {
		return 0
	}
	var times, sizes float64
	n := float64(len(l.recent))
	for _, p := range l.recent {
		times += p.at.Seconds() / n
		sizes += float64(p.free) / n
	}
	var above, below float64
	for _, p := range l.recent {
		apart := p.at.Seconds() - times
		above += apart * (float64(p.free) - sizes)
		below += apart * apart
	}
	if above >= 0 {
		return 0
	}
	return time.Duration(min(float64(l.free)*below/-above, 1e9) * float64(time.Second))
}

// headroom returns the limit of which least is left, or nil.
func (s *State) headroom() *limit {
	var least *limit
	for _, l := range s.limits {
		if !l.apart && (least == nil || l.free < least.free) {
			least = l
		}
	}
	return least
}

// warnings returns what the user should look at.
func (s *State) warnings() []string {
	var all []string
	if s.sample == nil || s.end != nil {
		return nil
	}
	for _, l := range s.limits {
		in := l.fullIn()
		switch {
		case in > 0 && in <= soon:
			all = append(all,
				fmt.Sprintf("%s is full in about %s at the present growth: %v left", l.name, about(in), l.free))
		case l.free < l.of/lowShare:
			all = append(all, fmt.Sprintf("%s is nearly full: %v of %v left", l.name, l.free, l.of))
		}
	}
	if taken, grows := s.swap.taken(); grows {
		all = append(all, fmt.Sprintf("the host swaps: %v more than %v ago", taken, s.swap.span().Round(time.Second)))
	}
	if kills := s.sample.Node.Kills - s.first.Node.Kills; kills > 0 {
		all = append(all, fmt.Sprintf("the kernel's OOM killer has ended %d processes of this host", kills))
	}
	for _, group := range s.sample.Groups {
		i := slices.IndexFunc(s.first.Groups, func(g samples.Group) bool { return g.Name == group.Name })
		if i >= 0 && group.Events.OOMKill > s.first.Groups[i].Events.OOMKill {
			all = append(all, fmt.Sprintf("%d of them at the limit of %s",
				group.Events.OOMKill-s.first.Groups[i].Events.OOMKill, clean(group.Name)))
		}
	}
	for _, gpu := range s.sample.GPUs {
		if gpu.ECCErrors > 0 {
			all = append(all, fmt.Sprintf("GPU %d has had %d ECC errors", gpu.Index, gpu.ECCErrors))
		}
	}
	return all
}

// about returns a time in words.
func about(d time.Duration) string {
	if d < 90*time.Second {
		return fmt.Sprintf("%d s", int(d.Seconds()+0.5))
	}
	return fmt.Sprintf("%d min", int(d.Minutes()+0.5))
}
