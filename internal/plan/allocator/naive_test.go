package allocator

import (
	"cmp"
	"math/bits"
	"slices"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
)

// naive is a second CUDA, as plain as it can be: segments are slices of
// ranges, everything is found by looking at everything, and statistics are
// sums.
type naive struct {
	configuration Configuration
	capacity      ledger.Bytes
	segments      []*naiveSegment
	searches      int // of the large pool
	retries       int
	made          int // segments so far
}

type naiveSegment struct {
	id     int
	small  bool
	stream int
	ranges []naiveRange
}

type naiveRange struct {
	size, requested ledger.Bytes
	kind            string // "free", "used", "waiting", "unmapped"
	name            int
	since           int
}

// allocate is where the block is, and nil where there is no room for it.
func (n *naive) allocate(name int, size ledger.Bytes, stream int) *place {
	rounded := n.round(size)
	small := rounded <= ledger.MiB
	if !small {
		n.searches++
	}
	s, i := n.fit(rounded, stream, small)
	if s == nil {
		if f := n.configuration.MemoryFraction; f > 0 && f < 1 && n.configuration.GarbageCollection > 0 {
			n.collect()
		}
		s, i = n.grow(rounded, stream, small)
	}
	if s == nil && n.configuration.MaxSplit > 0 && n.releaseOversize(rounded, stream, small) {
		s, i = n.grow(rounded, stream, small)
	}
	if s == nil {
		n.emptyCache()
		n.retries++
		s, i = n.grow(rounded, stream, small)
	}
	if s == nil {
		return nil
	}
	rest := s.ranges[i].size - rounded
	limit := n.configuration.MaxSplit
	if (small || n.configuration.Expandable) && rest >= 512 ||
		!small && !n.configuration.Expandable && rest > ledger.MiB && (limit == 0 || rounded < limit) {
		s.ranges[i].size = rounded
		s.ranges = slices.Insert(s.ranges, i+1, naiveRange{size: rest, kind: "free", since: n.searches})
	}
	s.ranges[i].requested, s.ranges[i].kind, s.ranges[i].name = size, "used", name
	where := &place{size: s.ranges[i].size, segment: s.id}
	for _, before := range s.ranges[:i] {
		where.offset += before.size
	}
	return where
}

func (n *naive) newSegment(small bool, stream int, all naiveRange) *naiveSegment {
	n.made++
	s := &naiveSegment{n.made, small, stream, []naiveRange{all}}
	n.segments = append(n.segments, s)
	return s
}

func (n *naive) round(size ledger.Bytes) ledger.Bytes {
	bucket := 0
	for bucket < 15 && size >= 2*ledger.MiB<<bucket {
		bucket++
	}
	if d := n.configuration.Divisions[bucket]; d > 1 && size > 512*d {
		power := ledger.Bytes(1)
		for power*2 <= size {
			power *= 2
		}
		for rounded := power; ; rounded += power / d {
			if rounded >= size {
				return rounded
			}
		}
	}
	return max(512, (size+511)/512*512)
}

// fit is the best free range, in the order of size, segment, offset.
func (n *naive) fit(size ledger.Bytes, stream int, small bool) (*naiveSegment, int) {
	type candidate struct {
		segment     *naiveSegment
		at          int
		size, reach ledger.Bytes
	}
	all := []candidate{}
	for _, s := range n.segments {
		for i, r := range s.ranges {
			if s.stream == stream && s.small == small && r.kind == "free" && r.size >= size {
				reach := r.size
				if i+1 < len(s.ranges) && s.ranges[i+1].kind == "unmapped" {
					reach += s.ranges[i+1].size
				}
				all = append(all, candidate{s, i, r.size, reach})
			}
		}
	}
	if len(all) == 0 {
		return nil, 0
	}
	slices.SortStableFunc(all, func(a, b candidate) int { return cmp.Compare(a.size, b.size) })
	best := 0
	for n.configuration.Expandable && best+1 < len(all) && all[best+1].reach < all[best].reach {
		best++
	}
	c := all[best]
	if limit := n.configuration.MaxSplit; limit > 0 {
		rounding := n.configuration.MaxNonSplitRounding
		if rounding == 0 {
			rounding = 20 * ledger.MiB
		}
		if size < limit && c.size >= limit || size >= limit && c.size >= size+rounding {
			return nil, 0
		}
	}
	return c.segment, c.at
}

func (n *naive) large() ledger.Bytes {
	if n.configuration.LargeSegment > 0 {
		return n.configuration.LargeSegment
	}
	return 20 * ledger.MiB
}

func (n *naive) page(small bool) ledger.Bytes {
	if small {
		return 2 * ledger.MiB
	}
	return n.large()
}

func (n *naive) grow(size ledger.Bytes, stream int, small bool) (*naiveSegment, int) {
	segment := 2 * ledger.MiB
	if !small {
		segment = n.large()
		if size >= 10*ledger.MiB {
			segment = (size + 2*ledger.MiB - 1) / (2 * ledger.MiB) * (2 * ledger.MiB)
		}
	}
	reserved := n.sum(func(_ *naiveSegment, r naiveRange) bool { return r.kind != "unmapped" })
	if f := n.configuration.MemoryFraction; f > 0 && f < 1 && reserved+segment > ledger.Bytes(f*float64(n.capacity)) {
		return nil, 0
	}
	if n.configuration.Expandable {
		return n.expand(size, stream, small)
	}
	if reserved+segment > n.capacity {
		return nil, 0
	}
	return n.newSegment(small, stream, naiveRange{size: segment, kind: "free", since: n.searches}), 0
}

func (n *naive) expand(size ledger.Bytes, stream int, small bool) (*naiveSegment, int) {
	page := n.page(small)
	unused := func(r naiveRange) bool { return r.kind == "free" || r.kind == "unmapped" }
	var segment *naiveSegment
	at := 0
search:
	for _, s := range n.segments {
		if s.stream != stream || s.small != small {
			continue
		}
		for i := range s.ranges {
			if s.ranges[i].kind != "unmapped" {
				continue
			}
			start := i
			if i > 0 && unused(s.ranges[i-1]) {
				start--
			}
			room := ledger.Bytes(0)
			for j := start; j < len(s.ranges) && unused(s.ranges[j]); j++ {
				room += s.ranges[j].size
			}
			if room >= size {
				segment, at = s, start
				break search
			}
		}
	}
	if segment == nil {
		space := (n.capacity + n.capacity/8 + page - 1) / page * page
		segment = n.newSegment(small, stream, naiveRange{size: space, kind: "unmapped"})
	}
	// Map hole by hole until the range at "at" is free and large enough.
	for segment.ranges[at].kind == "unmapped" || segment.ranges[at].size < size {
		hole, need := at, size
		if segment.ranges[at].kind == "free" {
			hole, need = at+1, size-segment.ranges[at].size
		}
		r := segment.ranges[hole]
		mapped := (min(need, r.size) + page - 1) / page * page
		if n.sum(func(_ *naiveSegment, r naiveRange) bool { return r.kind != "unmapped" })+mapped > n.capacity {
			return nil, 0
		}
		segment.ranges[hole] = naiveRange{size: mapped, kind: "free", since: n.searches}
		if r.size > mapped {
			segment.ranges = slices.Insert(segment.ranges, hole+1, naiveRange{size: r.size - mapped, kind: "unmapped"})
		}
		n.merge()
	}
	return segment, at
}

// merge joins all neighbours of one unused kind.
func (n *naive) merge() {
	for _, s := range n.segments {
		for i := 0; i+1 < len(s.ranges); {
			a, b := &s.ranges[i], s.ranges[i+1]
			if a.kind == b.kind && (a.kind == "free" || a.kind == "unmapped") {
				a.size += b.size
				a.since = n.searches
				s.ranges = slices.Delete(s.ranges, i+1, i+2)
			} else {
				i++
			}
		}
	}
}

func (n *naive) free(name int, kind string) {
	for _, s := range n.segments {
		for i := range s.ranges {
			if s.ranges[i].name == name && s.ranges[i].kind == "used" {
				s.ranges[i].kind, s.ranges[i].since = kind, n.searches
			}
		}
	}
	n.merge()
}

func (n *naive) synchronize() {
	for _, s := range n.segments {
		for i := range s.ranges {
			if s.ranges[i].kind == "waiting" {
				s.ranges[i].kind, s.ranges[i].since = "free", n.searches
			}
		}
	}
	n.merge()
}

func (s *naiveSegment) whole() bool { return len(s.ranges) == 1 && s.ranges[0].kind == "free" }

func (n *naive) emptyCache() {
	n.synchronize()
	if !n.configuration.Expandable {
		n.segments = slices.DeleteFunc(n.segments, (*naiveSegment).whole)
		return
	}
	shrunk := map[*naiveSegment]bool{}
	for _, s := range n.segments {
		page, offset, after := n.page(s.small), ledger.Bytes(0), []naiveRange{}
		for _, r := range s.ranges {
			begin, end := (offset+page-1)/page*page, (offset+r.size)/page*page
			if r.kind != "free" || begin >= end {
				after = append(after, r)
			} else {
				shrunk[s] = true
				for _, part := range []naiveRange{
					{size: begin - offset, kind: "free", since: n.searches},
					{size: end - begin, kind: "unmapped"},
					{size: offset + r.size - end, kind: "free", since: n.searches},
				} {
					if part.size > 0 {
						after = append(after, part)
					}
				}
			}
			offset += r.size
		}
		s.ranges = after
	}
	n.merge()
	// One that could not be mapped at all stays, as address space.
	n.segments = slices.DeleteFunc(n.segments, func(s *naiveSegment) bool {
		return shrunk[s] && len(s.ranges) == 1 && s.ranges[0].kind == "unmapped"
	})
}

func (n *naive) releaseOversize(size ledger.Bytes, stream int, small bool) bool {
	limit := n.configuration.MaxSplit
	wanted := max(size, limit)
	oversize := []*naiveSegment{}
	for _, s := range n.segments {
		if s.stream == stream && s.small == small && s.whole() && s.ranges[0].size >= limit &&
			!n.configuration.Expandable {
			oversize = append(oversize, s)
		}
	}
	slices.SortStableFunc(
		oversize,
		func(a, b *naiveSegment) int { return cmp.Compare(a.ranges[0].size, b.ranges[0].size) },
	)
	gone := []*naiveSegment{}
	if i := slices.IndexFunc(oversize, func(s *naiveSegment) bool { return s.ranges[0].size >= wanted }); i >= 0 {
		gone = oversize[i : i+1]
	} else {
		sum := ledger.Bytes(0)
		for i := len(oversize) - 1; i >= 0 && sum < wanted; i-- {
			sum += oversize[i].ranges[0].size
			gone = append(gone, oversize[i])
		}
	}
	released := ledger.Bytes(0)
	for _, s := range gone {
		released += s.ranges[0].size
	}
	n.segments = slices.DeleteFunc(n.segments, func(s *naiveSegment) bool { return slices.Contains(gone, s) })
	return released >= wanted
}

func (n *naive) collect() {
	if n.configuration.Expandable {
		return
	}
	allowed := ledger.Bytes(n.configuration.MemoryFraction * float64(n.capacity))
	threshold := ledger.Bytes(n.configuration.GarbageCollection * float64(allowed))
	for excess := n.sum(func(*naiveSegment, naiveRange) bool { return true }) - threshold; excess > 0; {
		ages, count := 0, 0
		old := func(s *naiveSegment) bool { return !s.small && s.whole() }
		for _, s := range n.segments {
			if old(s) {
				ages += n.searches - s.ranges[0].since
				count++
			}
		}
		if count == 0 {
			return
		}
		n.segments = slices.DeleteFunc(n.segments, func(s *naiveSegment) bool {
			if !old(s) || float64(n.searches-s.ranges[0].since) < float64(ages)/float64(count) {
				return false
			}
			excess -= s.ranges[0].size
			return true
		})
	}
}

func (n *naive) sum(keep func(*naiveSegment, naiveRange) bool) ledger.Bytes {
	sum := ledger.Bytes(0)
	for _, s := range n.segments {
		for _, r := range s.ranges {
			if keep(s, r) {
				sum += r.size
			}
		}
	}
	return sum
}

// levels are the statistics of now, without peaks.
func (n *naive) levels() Statistics {
	var s Statistics
	s.Reserved.Now = n.sum(func(_ *naiveSegment, r naiveRange) bool { return r.kind != "unmapped" })
	s.Allocated.Now = n.sum(func(_ *naiveSegment, r naiveRange) bool { return r.kind == "used" })
	s.Active.Now = n.sum(func(_ *naiveSegment, r naiveRange) bool { return r.kind == "used" || r.kind == "waiting" })
	if !n.configuration.Expandable {
		s.InactiveSplit.Now = n.sum(
			func(s *naiveSegment, r naiveRange) bool { return r.kind == "free" && len(s.ranges) > 1 },
		)
		s.Segments.Now = len(n.segments)
	}
	for _, segment := range n.segments {
		for _, r := range segment.ranges {
			if r.kind == "used" || r.kind == "waiting" {
				s.Requested.Now += r.requested
			}
		}
	}
	s.Retries = n.retries
	return s
}

// naivePinned is a second Pinned.
type naivePinned struct {
	configuration Configuration
	version       version.Version
	blocks        []naivePinnedBlock
	slab          bool
	slabUsed      ledger.Bytes
}

type naivePinnedBlock struct {
	size, requested ledger.Bytes
	name            int // 0 when unused
	freed           int // when, to tell the last one
	slab            bool
}

func (n *naivePinned) allocate(name int, size ledger.Bytes) {
	rounded := size
	c := n.configuration
	exempt := c.PinnedMaxRound != nil && size > *c.PinnedMaxRound ||
		c.PinnedMaxCached != nil && size > *c.PinnedMaxCached
	switch {
	case exempt:
		rounded = (size + 511) / 512 * 512
	case n.version.AtLeast(1, 11, 0):
		rounded = 1 << bits.Len64(uint64(size-1))
	}
	best := -1
	for i, b := range n.blocks {
		if b.name != 0 {
			continue
		}
		if n.version.AtLeast(2, 6, 0) {
			if b.size == rounded && (best < 0 || b.freed > n.blocks[best].freed) {
				best = i
			}
		} else if b.size >= size && (best < 0 || b.size < n.blocks[best].size) {
			best = i
		}
	}
	if best >= 0 {
		n.blocks[best].name, n.blocks[best].requested = name, size
		return
	}
	if c.PinnedReserve > 0 {
		n.slab = true
	}
	b := naivePinnedBlock{size: rounded, requested: size, name: name}
	if aligned := (rounded + 4095) / 4096 * 4096; n.slabUsed+aligned <= c.PinnedReserve {
		n.slabUsed += aligned
		b.slab = true
	}
	n.blocks = append(n.blocks, b)
}

func (n *naivePinned) free(name, when int) {
	i := slices.IndexFunc(n.blocks, func(b naivePinnedBlock) bool { return b.name == name })
	n.blocks[i].name, n.blocks[i].freed = 0, when
	if limit := n.configuration.PinnedMaxCached; limit != nil && n.blocks[i].size > *limit {
		n.blocks = slices.Delete(n.blocks, i, i+1)
	}
}

func (n *naivePinned) emptyCache() {
	n.blocks = slices.DeleteFunc(n.blocks, func(b naivePinnedBlock) bool { return b.name == 0 })
}

func (n *naivePinned) levels() (requested, allocated, locked ledger.Bytes) {
	if n.slab {
		locked = n.configuration.PinnedReserve
	}
	for _, b := range n.blocks {
		if b.name != 0 {
			requested += b.requested
			allocated += b.size
		}
		if !b.slab {
			locked += b.size
		}
	}
	return requested, allocated, locked
}
