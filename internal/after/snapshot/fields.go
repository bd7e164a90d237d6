package snapshot

import (
	"math"
	"regexp"
	"slices"
	"strconv"

	"plimsoll/internal/base/ledger"
)

func (f fields) frame() (frame Frame) {
	f.each(func(key uint32, v value) {
		switch key {
		case keyFilename, keyName:
			f.text(key, v)
			if key == keyName {
				frame.name = uint32(v.n)
			} else {
				frame.file = uint32(v.n)
			}
		case keyLine:
			// Frames of C++ may have any number, and none is more than 31 bits long.
			frame.line = int32(min(f.number(key, v), math.MaxInt32))
		}
	})
	if f.texts.all[frame.file] == "none" {
		f.unpack(&frame)
	}
	return frame
}

// packed is a frame of torch.profiler, which writes all of it into the name.
var packed = regexp.MustCompile(`^(.+\.py)\((\d+)\): (.+)$`)

func (f fields) unpack(frame *Frame) {
	if parts := packed.FindStringSubmatch(f.texts.all[frame.name]); parts != nil {
		line, _ := strconv.ParseInt(parts[2], 10, 32) // 0 for a number out of range
		frame.line = int32(line)
		frame.file = f.texts.number(f.budget, []byte(parts[1]))
		frame.name = f.texts.number(f.budget, []byte(parts[3]))
	}
}

// actions and states by their names.
var (
	actions = map[string]Action{"alloc": Alloc, "free_requested": FreeRequested, "free_completed": FreeCompleted,
		"segment_alloc": SegmentAlloc, "segment_free": SegmentFree, "segment_map": SegmentMap,
		"segment_unmap": SegmentUnmap, "oom": OOM, "snapshot": noAction, "annotate": noAction}
	states = map[string]State{"inactive": Inactive, "active_allocated": Allocated, "active_pending_free": PendingFree,
		"active_awaiting_free": PendingFree}
)

// categories are what torch.profiler calls memory. A snapshot made of a profile has them.
var (
	categoryNames = []string{"unknown", "parameter", "optimizer_state", "input", "temporary", "activation", "gradient",
		"autograd_detail"}
	categories = []ledger.Component{"", ledger.Parameters, ledger.OptimizerStates, ledger.Batch,
		ledger.OperationScratch, ledger.Activations, ledger.Gradients, ledger.ActivationGradients}
)

func (f fields) event() (e Event) {
	f.each(func(key uint32, v value) {
		switch key {
		case keyAction:
			name := f.text(key, v)
			if e.Action = actions[name]; e.Action == otherAction {
				f.others[name]++
			}
		case keyAddr, keyDeviceFree:
			e.Address = f.number(key, v)
		case keySize:
			e.Size = f.size(key, v)
		case keyStream:
			e.stream = f.streams.number(f.budget, f.number(key, v))
		case keyTime:
			e.Time = int64(f.number(key, v))
		case keyFrames:
			e.stack = f.stack(key, v)
		case keyForwardFrames:
			e.backward = v.kind == opaque && v.n > 0
		case keyCategory:
			e.category = uint8(max(0, slices.Index(categoryNames, f.text(key, v))))
		}
	})
	return e
}

func (f fields) historical() (h historical) {
	f.each(func(key uint32, v value) {
		switch key {
		case keyRealSize:
			h.requested = f.size(key, v)
		case keyFrames:
			h.stack = f.stack(key, v)
		}
	})
	return h
}

// block reads a block. One of PyTorch 2.0 and before says what was requested in its history, the latest first.
func (f fields) block() (b Block) {
	requested := ledger.Bytes(-1)
	f.each(func(key uint32, v value) {
		switch key {
		case keyAddress:
			b.Address = f.number(key, v)
		case keySize:
			b.Size = f.size(key, v)
		case keyRequested:
			requested = f.size(key, v)
		case keyState:
			state, known := states[f.text(key, v)]
			if !known {
				f.fail("state: found %q, expected inactive, active_allocated or active_pending_free", f.text(key, v))
			}
			b.State = state
		case keyFrames:
			b.stack = f.stack(key, v)
		case keyHistory:
			if r := f.rows(key, v, historyRole); r.first < r.last {
				latest := f.history.at(r.first)
				requested, b.stack = latest.requested, latest.stack
			}
		}
	})
	if requested < 0 {
		requested = b.Size
	}
	if b.State != Inactive {
		b.Requested = requested
	}
	if b.stack == emptyStack {
		b.stack = noStack // PyTorch writes the same for a block without a record
	}
	return b
}

func (f fields) segment() (g Segment) {
	f.each(func(key uint32, v value) {
		switch key {
		case keyDevice:
			g.Device = f.small(key, v)
		case keyAddress:
			g.Address = f.number(key, v)
		case keyTotalSize:
			g.Size = f.size(key, v)
		case keyStream:
			g.Stream = f.number(key, v)
			f.streams.number(f.budget, g.Stream)
		case keySegmentPool:
			g.Pool = f.pools.all[f.pool(key, v)]
		case keySegmentType:
			g.Large = f.text(key, v) == "large"
		case keyBlocks:
			g.blocks = f.rows(key, v, blockRole)
		}
	})
	f.place(&g)
	return g
}

// place gives the blocks of old files their addresses, and checks that the blocks fill the segment.
func (f fields) place(g *Segment) {
	address, sum := g.Address, ledger.Bytes(0)
	for n := g.blocks.first; n < g.blocks.last; n++ {
		b := f.blocks.at(n)
		if b.Address == 0 {
			b.Address = address
		}
		address += uint64(b.Size)
		if sum += b.Size; sum > mostBytes {
			break
		}
	}
	if sum != g.Size {
		f.fail("the segment at 0x%x has %d bytes and its blocks add up to %d", g.Address, g.Size, sum)
	}
}

func (f fields) annotation() (a Annotation) {
	f.each(func(key uint32, v value) {
		switch key {
		case keyDevice:
			a.Device = f.small(key, v)
		case keyTime:
			a.Time = int64(f.number(key, v))
		case keyName:
			a.Name = f.text(key, v)
		case keyStage:
			a.Begins = f.text(key, v) == "START"
		}
	})
	return a
}

func (f fields) settings() Settings {
	s := Settings{Known: true}
	f.each(func(key uint32, v value) {
		switch key {
		case keyConfiguration:
			s.Configuration = f.text(key, v)
		case keyMaxSplit:
			if n := f.number(key, v); n <= mostBytes { // -1 for no limit
				s.MaxSplit = ledger.Bytes(n)
			}
		case keyExpandableSegments:
			s.Expandable = f.bool(key, v)
		case keyGarbage:
			if v.kind == float {
				s.GarbageAbove = math.Float64frombits(v.n)
			}
		}
	})
	return s
}

func (f fields) root() (r root) {
	f.each(func(key uint32, v value) {
		switch key {
		case keySegments:
			r.segments = f.rows(key, v, segmentRole)
		case keyDeviceTraces:
			switch {
			case v.kind == empty:
			case v.kind == listOfRows && (v.role == eventRole || v.role == noRole):
				r.traces = *f.records.lists.at(uint32(v.n))
			default:
				f.wrong(key, v, "a list of lists of entries")
			}
		case keyAnnotations:
			r.annotations = f.rows(key, v, annotationRole)
		case keySettings:
			if v.kind != aRecord || v.role != settingsRole {
				f.wrong(key, v, "a dictionary of settings")
			}
			r.settings = *f.records.settings.at(uint32(v.n))
		}
	})
	return r
}
