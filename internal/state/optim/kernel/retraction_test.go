//go:build linux

package kernel

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim/kernel/abi"
)

// retractable are all formats whose updates can be retracted.
func retractable() (some []Format) {
	for _, f := range formats() {
		if f.Retractable() == nil {
			some = append(some, f)
		}
	}
	return some
}

// imageOf returns everything of a chunk but its gradients.
func imageOf(c Chunk) (image []byte) {
	for role := ParameterRole; role < GradientRole; role++ {
		image = append(image, c.Bytes(role)...)
	}
	return image
}

// fillTrained fills a chunk as after many steps, and some elements otherwise: with weights of zero, moments of elements
// that never had a gradient, and now and then with the strange numbers of [fill].
func fillTrained(r *rand.Rand, f Format, c Chunk, constants *Constants) {
	strange := r.IntN(4) / 2 * r.IntN(4)
	for i := range c.Len() {
		scale := math.Exp2(float64(r.IntN(12) - 10))
		c.PutMasterWeight(f, i, float32(r.NormFloat64()*0.02))
		c.Moments[0].Put(i, float32(0.3*scale*r.NormFloat64()))
		c.Moments[1].Put(i, float32(scale*scale*(0.5+r.Float64())))
		c.Gradient.Put(i, float32(scale*r.NormFloat64()/float64(constants.table[abi.GradScale][0])))
		switch r.IntN(16) {
		case 0:
			c.Moments[0].Put(i, 0)
			c.Moments[1].Put(i, 0)
		case 1:
			c.Gradient.Put(i, 0)
		case 2:
			c.PutMasterWeight(f, i, 0)
		}
	}
	for range strange {
		at := r.IntN(c.Len())
		fill(r, f, c.Slice(at, at+1), true)
	}
}

// TestUpdatesAreRetracted retracts updates that other sets of kernels have prepared, and yet others have made. Every
// bit is what it was. A retraction may be broken off anywhere, and another set goes on.
func TestUpdatesAreRetracted(t *testing.T) {
	made, refused := 0, 0
	for _, f := range retractable() {
		t.Run(f.String(), func(t *testing.T) {
			undo := UndoIn(make([]byte, f.UndoBytes()))
			rapid.Check(t, func(t *rapid.T) {
				r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
				sets := Available()
				set := func() Set { return sets[r.IntN(len(sets))] }
				c := plainChunk(f, 1+r.IntN(700))
				constants := steps(f.Algorithm)[r.IntN(1+r.IntN(5))]
				fillTrained(r, f, c, &constants)
				log := RetractionIn(make([]byte, RetractionBytes(c.Len())))
				was, gradients := imageOf(c), bytes.Clone(c.Gradient.Data)
				ok := new(Retractor).Prepare(set(), f, &constants, c, log)
				if !bytes.Equal(imageOf(c), was) || !bytes.Equal(c.Gradient.Data, gradients) {
					t.Fatal("preparing has changed the chunk")
				}
				if !ok {
					refused++
					return
				}
				made++
				set().Update(f, &constants, c)
				undo.Begin()
				first := 0
				for range r.IntN(3) {
					end := min(c.Len(), first+r.IntN(c.Len()/16+1)*16)
					if retracted := c.Slice(0, end); end > first {
						// as a process does that is killed then
						if !new(Retractor).Retract(set(), f, &constants, retracted, log, first, undo) {
							t.Fatal("the log of a part was not taken for one")
						}
						spoil(r, f, c.Slice(max(end-1, 0)/16*16, end))
						first = undo.Restore(f, c)
					}
				}
				if !new(Retractor).Retract(set(), f, &constants, c, log, first, undo) {
					t.Fatal("the log was not taken for one")
				}
				if !bytes.Equal(imageOf(c), was) {
					t.Fatal("the chunk is another than before the update")
				}
			})
		})
	}
	if made < 2*refused {
		t.Errorf("%d updates were retracted, and %d could not be: that proves little", made, refused)
	}
}

// TestLogsAgree: all sets write the same log.
func TestLogsAgree(t *testing.T) {
	for _, f := range retractable() {
		r := rand.New(rand.NewPCG(5, 5))
		for _, n := range []int{1, 15, 16, 255, 256, 257, 272, 511, 512, 600, 1024} {
			c := newChunk(t, f, n, r.IntN(16))
			logs := make([]Retraction, len(testedSets(t)))
			for i := range logs {
				logs[i] = RetractionIn(guarded(t, RetractionBytes(n), 64, 0))
			}
			for step, constants := range steps(f.Algorithm) {
				fillTrained(r, f, c, &constants)
				var could []bool
				for i, set := range testedSets(t) {
					could = append(could, new(Retractor).Prepare(set, f, &constants, c, logs[i]))
					if could[i] != could[0] || could[0] && !bytes.Equal(logs[i].bytes, logs[0].bytes) {
						t.Fatalf("%v, step %d: %v writes another log than %v", f, step, set, testedSets(t)[0])
					}
				}
			}
		}
	}
}

// TestRetractionsOfTraining trains: gradients of many sizes, some rows that rarely have any, and weights of zero in
// the beginning. Every step is retracted and made again. From the tenth step on none is refused.
func TestRetractionsOfTraining(t *testing.T) {
	for _, f := range []Format{
		{Adam, Split, MomentsFP32, dtype.BF16, dtype.BF16}, {Adam, FP32, MomentsFP32, dtype.F32, dtype.F32},
		{Adam, FP32, MomentsFP32, dtype.F16, dtype.F16},
	} {
		t.Run(f.String(), func(t *testing.T) {
			r := rand.New(rand.NewPCG(7, 7))
			c := plainChunk(f, 16<<10)
			for i := range c.Len() {
				c.PutMasterWeight(f, i, float32(r.NormFloat64()*0.02)*float32(min(i%5, 1)))
			}
			log, set := RetractionIn(make([]byte, RetractionBytes(c.Len()))), Available()[len(Available())-1]
			refused := 0
			for step := range int64(200) {
				var constants Constants
				if err := (AdamStep{LearningRate: 1e-3, Beta1: 0.9, Beta2: 0.999, Epsilon: 1e-8, WeightDecay: 0.01,
					Step: step + 1, GradScale: 1}).Constants(&constants); err != nil {
					t.Fatal(err)
				}
				for i := range c.Len() {
					scale := math.Exp2(float64(i%17) - 20)
					if i%64 == 0 && r.IntN(10) > 0 {
						scale = 0
					}
					c.Gradient.Put(i, float32(r.NormFloat64()*scale))
				}
				was := imageOf(c)
				ok := new(Retractor).Prepare(set, f, &constants, c, log)
				set.Update(f, &constants, c)
				after := imageOf(c)
				if !ok {
					if refused++; step >= 10 {
						t.Errorf("step %d could not be retracted", step+1)
					}
					continue
				}
				if !new(Retractor).Retract(set, f, &constants, c, log, 0, Undo{}) || !bytes.Equal(imageOf(c), was) {
					t.Fatalf("step %d: the retracted state is another", step+1)
				}
				set.Update(f, &constants, c)
				if !bytes.Equal(imageOf(c), after) {
					t.Fatalf("step %d: the step that was made again is another", step+1)
				}
			}
			t.Logf("%d of 200 steps could not be retracted", refused)
		})
	}
}

// TestNoRoomForEscapes: gradients that are not finite, and parameters that are no copies, are refused.
func TestNoRoomForEscapes(t *testing.T) {
	f := Format{Adam, FP32, MomentsFP32, dtype.BF16, dtype.BF16}
	constants := steps(Adam)[0]
	for _, test := range []struct {
		name  string
		spoil func(c Chunk)
		want  bool
	}{
		{"nothing", func(Chunk) {}, true},
		{"one NaN", func(c Chunk) { c.Gradient.Put(5, float32(math.NaN())) }, true},
		{"infinite gradients", func(c Chunk) {
			for i := range c.Len() {
				c.Gradient.Put(i, float32(math.Inf(1)))
			}
		}, false},
		{"another parameter", func(c Chunk) { c.Parameter[300]++ }, false},
	} {
		c := plainChunk(f, 1000)
		fillTrained(rand.New(rand.NewPCG(1, 1)), f, c, &constants)
		test.spoil(c)
		log := RetractionIn(make([]byte, RetractionBytes(c.Len())))
		if got := new(Retractor).Prepare(Generic, f, &constants, c, log); got != test.want {
			t.Errorf("%s: can be retracted: %v, want %v", test.name, got, test.want)
		}
	}
}

// FuzzRetraction gives logs that no update has prepared: they are refused or retract something, and nothing else
// happens.
func FuzzRetraction(f *testing.F) {
	f.Add([]byte{}, uint16(300))
	f.Add(bytes.Repeat([]byte{0xff}, 600), uint16(256))
	format := Format{Adam, Split, MomentsFP32, dtype.BF16, dtype.BF16}
	constants := steps(Adam)[0]
	f.Fuzz(func(t *testing.T, text []byte, n uint16) {
		c := plainChunk(format, 1+int(n)%1000)
		fill(rand.New(rand.NewPCG(1, 1)), format, c, false)
		log := RetractionIn(make([]byte, RetractionBytes(c.Len())))
		copy(log.bytes, text)
		new(Retractor).Retract(Generic, format, &constants, c, log, 0, Undo{})
	})
}

// TestRetractionsAllocateNothing, as steps do.
func TestRetractionsAllocateNothing(t *testing.T) {
	for _, f := range retractable() {
		for _, set := range testedSets(t) {
			constants, c, r := steps(Adam)[0], plainChunk(f, 1000), new(Retractor)
			log := RetractionIn(make([]byte, RetractionBytes(c.Len())))
			if n := testing.AllocsPerRun(10, func() {
				r.Prepare(set, f, &constants, c, log)
				r.Retract(set, f, &constants, c, log, 0, Undo{})
			}); n != 0 {
				t.Errorf("%v, %v: %v allocations", set, f, n)
			}
		}
	}
}

// TestRetractionBytes: a byte for each element of a chunk of the usual size.
func TestRetractionBytes(t *testing.T) {
	for elements, want := range map[int]int{1: 384, 256: 384, 64 << 10: 64 << 10, 1 << 20: 1 << 20} {
		if got := RetractionBytes(elements); got != want {
			t.Errorf("the log of %d elements has %d bytes, want %d", elements, got, want)
		}
	}
}

// BenchmarkRetraction measures what it takes to prepare a retraction and make an update, and to make an update and
// retract it, beside an update alone: of one chunk, which stays in the second-level cache, and of many from memory.
func BenchmarkRetraction(b *testing.B) {
	for _, many := range []int{1, 512} {
		bench := newRetractionBench(b, many)
		for _, set := range Available() {
			for _, pass := range []string{"update", "prepare-and-update", "update-and-retract"} {
				b.Run(fmt.Sprintf("chunks=%d/impl=%v/pass=%s", many, set, pass), func(b *testing.B) {
					for i := 0; b.Loop(); i++ {
						if !bench.run(set, pass, i%many) {
							b.Fatal("the update cannot be retracted")
						}
					}
					b.ReportMetric(float64(b.Elapsed())/float64(b.N)/retractionBenchLength, "ns/parameter")
				})
			}
		}
	}
}

// retractionBench has chunks that are alike, and what retracts an update of each.
type retractionBench struct {
	format    Format
	constants Constants
	chunks    []Chunk
	logs      []Retraction
	undo      Undo
	retractor *Retractor
}

const retractionBenchLength = 32 << 10

func newRetractionBench(b *testing.B, many int) *retractionBench {
	f := Format{Adam, Split, MomentsFP32, dtype.BF16, dtype.BF16}
	bench := &retractionBench{format: f, constants: steps(Adam)[1], undo: UndoIn(make([]byte, f.UndoBytes())),
		retractor: new(Retractor)}
	for i := range many {
		c := newChunk(b, f, retractionBenchLength, 0)
		if i == 0 {
			fillTrained(rand.New(rand.NewPCG(1, 3)), f, c, &bench.constants)
		} else {
			copyChunk(c, bench.chunks[0])
		}
		bench.chunks = append(bench.chunks, c)
		bench.logs = append(bench.logs, RetractionIn(make([]byte, RetractionBytes(c.Len()))))
	}
	return bench
}

func (r *retractionBench) run(set Set, pass string, i int) bool {
	c, ok := r.chunks[i], true
	if pass == "prepare-and-update" {
		ok = r.retractor.Prepare(set, r.format, &r.constants, c, r.logs[i])
	}
	set.UpdateLogged(r.format, &r.constants, c, 0, r.undo)
	if pass == "update-and-retract" {
		ok = r.retractor.Retract(set, r.format, &r.constants, c, r.logs[i], 0, r.undo)
	}
	return ok
}
