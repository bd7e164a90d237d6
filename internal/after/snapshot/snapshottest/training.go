package snapshottest

import (
	"fmt"
	"io"
)

// Training is a transformer's training on one GPU.
type Training struct {
	Layers, Steps int
	Hidden        int64 // bytes of a layer's activation
	// Frames is how many frames a stack has beside its own two.
	Frames int
	// OutOfMemory ends the training in the backward pass with a failed allocation.
	OutOfMemory bool
	// Fused updates parameters without a temporary, and annotates the steps.
	Fused bool
	// EmptyCache returns unused segments to the driver after every step.
	EmptyCache bool
	// Last is how many entries the trace holds at most; 0 for all.
	Last int
	// Cut is how many of the last entries the trace lacks, as one that was written before them.
	Cut int
	// Settings are those of PYTORCH_CUDA_ALLOC_CONF that the file states. They change nothing.
	Settings string
}

// Totals are what the training held, for tests to compare.
type Totals struct {
	Allocated, Reserved, PeakAllocated, PeakReserved int64
	Events                                           int
}

type frame struct {
	file string
	line int64
	name string
}

// The innermost frames of allocations.
var (
	loading   = []frame{{site + "torch/nn/modules/module.py", 1365, "convert"}, {"train.py", 12, "<module>"}}
	linear    = []frame{{site + "torch/nn/modules/linear.py", 134, "forward"}, {llama, 182, "forward"}}
	norm      = []frame{{llama, 73, "forward"}, {llama, 310, "forward"}}
	attention = []frame{{site + "transformers/integrations/sdpa_attention.py", 96, "sdpa_attention_forward"},
		{llama, 280, "forward"}}
	loss     = []frame{{site + "torch/nn/functional.py", 3494, "cross_entropy"}, {"train.py", 31, "loss"}}
	states   = []frame{{site + "torch/optim/adamw.py", 180, "_init_group"}, {"train.py", 40, "<module>"}}
	update   = []frame{{site + "torch/optim/adam.py", 610, "_multi_tensor_adam"}, {"train.py", 40, "<module>"}}
	backward = []frame{}
)

const (
	site  = "/usr/lib/python3.12/site-packages/"
	llama = site + "transformers/models/llama/modeling_llama.py"
)

type event struct {
	action     string
	addr, size int64
	stack      []frame
}

// trainer runs the training.
type trainer struct {
	heap   *heap
	events []event
	live   int64
	steps  []int // entries at which the optimizer has begun its steps
	totals Totals
}

func (t *trainer) note(action string, addr, size int64, stack []frame) {
	t.events = append(t.events, event{action, addr, size, stack})
}

func (t *trainer) alloc(size int64, stack []frame) *block {
	b, segment := t.heap.alloc(size)
	if segment != nil {
		t.note("segment_alloc", segment.addr, segment.size, stack)
	}
	b.requested, b.stack = size, stack
	t.note("alloc", b.addr, size, stack)
	t.live += size
	t.totals.PeakAllocated = max(t.totals.PeakAllocated, t.live)
	t.totals.PeakReserved = max(t.totals.PeakReserved, t.heap.reserved)
	return b
}

func (t *trainer) free(blocks ...*block) {
	for _, b := range blocks {
		t.note("free_requested", b.addr, b.requested, b.stack)
		t.note("free_completed", b.addr, b.requested, b.stack)
		t.live -= b.requested
		t.heap.free(b)
	}
}

func (t *trainer) emptyCache() {
	for _, s := range t.heap.release() {
		t.note("segment_free", s.addr, s.size, backward)
	}
}

// run runs the training.
func (x Training) run() *trainer {
	t := &trainer{heap: new(heap)}
	weights := func(layer int) int64 { return x.Hidden + int64(layer)*4096 }
	for layer := range x.Layers {
		t.alloc(weights(layer), loading)
	}
	for step := range x.Steps {
		var saved, gradients, scratch []*block
		for range x.Layers {
			saved = append(saved, t.alloc(x.Hidden/2+int64(step%7)*1536, norm), t.alloc(x.Hidden, attention),
				t.alloc(2*x.Hidden, linear))
		}
		saved = append(saved, t.alloc(3*x.Hidden, loss))
		for layer := x.Layers - 1; layer >= 0; layer-- {
			if x.OutOfMemory && step == x.Steps-1 && layer == x.Layers/2 {
				t.emptyCache()
				free := t.totals.PeakReserved + 3<<20 - t.heap.reserved
				t.note("oom", free, 8*x.Hidden, backward) // addr holds the free bytes
				return t.done(x)
			}
			last := len(saved) - 3
			gradients = append(gradients, t.alloc(weights(layer), backward))
			scratch = append(scratch, t.alloc(x.Hidden+1000, backward))
			t.free(saved[last:]...)
			saved = saved[:last]
			if len(scratch) > 2 {
				t.free(scratch[0])
				scratch = scratch[1:]
			}
		}
		t.free(scratch...)
		t.free(saved...)
		if step == 0 {
			for layer := range x.Layers {
				t.alloc(weights(layer), states)
				t.alloc(weights(layer), states)
			}
		}
		if x.Fused {
			t.steps = append(t.steps, len(t.events))
		} else {
			t.free(t.alloc(weights(0)*2, update))
		}
		t.free(gradients...)
		if x.EmptyCache {
			t.emptyCache()
		}
	}
	return t.done(x)
}

func (t *trainer) done(x Training) *trainer {
	t.totals.Allocated, t.totals.Reserved = t.live, t.heap.reserved
	if x.Last > 0 && len(t.events) > x.Last {
		t.events = t.events[len(t.events)-x.Last:]
	}
	t.events = t.events[:len(t.events)-x.Cut]
	t.totals.Events = len(t.events)
	return t
}

// writer writes frames once and then refers to them, as PyTorch does.
type writer struct {
	*pickler
	frames map[frame]uint32
	outer  []frame
}

func (w *writer) stack(stack []frame) func() {
	return func() {
		outer := w.outer
		if len(stack) == 0 {
			outer = nil
		}
		w.sequence(len(stack)+len(outer), func(i int) {
			if i < len(stack) {
				w.frame(stack[i])
			} else {
				w.frame(outer[i-len(stack)])
			}
		})
	}
}

func (w *writer) frame(f frame) {
	if n, known := w.frames[f]; known {
		w.get(n)
		return
	}
	w.frames[f] = w.mapping("name", f.name, "filename", f.file, "line", f.line)
}

// Write writes the snapshot of the training.
func (x Training) Write(to io.Writer, style Style) (Totals, error) {
	t := x.run()
	w := &writer{newPickler(to, style), map[frame]uint32{}, nil}
	for i := range x.Frames {
		w.outer = append(w.outer, frame{"loop.py", int64(100 + i), fmt.Sprintf("outer_%d", i)})
	}
	const begin = 1_700_000_000_000_000
	w.mapping(
		"segments", func() { w.sequence(len(t.heap.segments), func(i int) { w.segment(t.heap.segments[i]) }) },
		"device_traces", func() {
			w.sequence(2, func(device int) {
				if device == 1 {
					w.sequence(0, nil)
					return
				}
				w.sequence(len(t.events), func(i int) { w.event(t.events[i], begin+int64(i)*100) })
			})
		},
		"allocator_settings", func() {
			w.mapping("PYTORCH_CUDA_ALLOC_CONF", x.Settings, "max_split_size", int64(-1),
				"garbage_collection_threshold", 0.0, "expandable_segments", false,
				"roundup_power2_divisions", func() { w.mapping("1", int64(0), "2", int64(0)) })
		},
		"external_annotations", func() {
			w.sequence(len(t.steps), func(i int) {
				w.mapping("device", int64(0), "time_us", begin+int64(t.steps[i])*100-50,
					"name", "Optimizer.step#AdamW.step", "stage", "START")
			})
		},
	)
	return t.totals, w.finish()
}

func (w *writer) event(e event, time int64) {
	address := "addr"
	if e.action == "oom" {
		address = "device_free"
	}
	w.mapping("action", e.action, address, e.addr, "size", e.size, "stream", int64(0), "time_us", time,
		"compile_context", "N/A", "user_metadata", "", "frames", w.stack(e.stack), "pool_id", w.pool)
}

func (w *writer) segment(s *segment) {
	kind := "large"
	if s.small {
		kind = "small"
	}
	var blocks []*block
	var allocated, requested int64
	for b := s.first; b != nil; b = b.next {
		blocks = append(blocks, b)
		if b.used {
			allocated, requested = allocated+b.size, requested+b.requested
		}
	}
	w.mapping("device", int64(0), "address", s.addr, "total_size", s.size, "allocated_size", allocated,
		"active_size", allocated, "requested_size", requested, "stream", int64(0), "segment_type", kind,
		"segment_pool_id", w.pool, "is_expandable", false, "frames", w.stack(nil),
		"blocks", func() { w.sequence(len(blocks), func(i int) { w.block(blocks[i]) }) })
}

func (w *writer) block(b *block) {
	state := "inactive"
	if b.used {
		state = "active_allocated"
	}
	w.mapping("address", b.addr, "size", b.size, "requested_size", b.requested, "state", state,
		"frames", w.stack(b.stack))
}
