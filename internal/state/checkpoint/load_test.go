//go:build linux

package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// drawFormat draws a format of an algorithm.
func drawFormat(t *rapid.T, algorithm kernel.Algorithm, label string) kernel.Format {
	var known []kernel.Format
	for _, f := range formats() {
		if f.Algorithm == algorithm {
			known = append(known, f)
		}
	}
	slices.SortFunc(known, func(a, b kernel.Format) int { return strings.Compare(a.String(), b.String()) })
	return rapid.SampledFrom(known).Draw(t, label)
}

// drawModel draws a model of a few parameters, around the size of a block.
func drawModel(t *rapid.T) []shardtest.Tensor {
	var model []shardtest.Tensor
	for i := range rapid.IntRange(1, 6).Draw(t, "parameters") {
		shape := rapid.SliceOfN(rapid.Int64Range(1, 40), 0, 3).Draw(t, "shape")
		model = append(model,
			shardtest.Tensor{fmt.Sprintf("layer.%d.weight", i), shape, rapid.IntRange(0, 1).Draw(t, "group")})
	}
	return model
}

// drawCuts cuts a model for a few ranks.
func drawCuts(t *rapid.T, model []shardtest.Tensor, label string) []int64 {
	count := int64(0)
	for _, p := range model {
		count += shardtest.Elements(p)
	}
	if count < 2 {
		return nil
	}
	cuts := rapid.SliceOfNDistinct(rapid.Int64Range(1, count-1), 0, int(min(3, count-1)),
		rapid.ID[int64]).Draw(t, label)
	slices.Sort(cuts)
	return cuts
}

// drawMoments gives the moments of some parameters another type than the format's.
func drawMoments(t *rapid.T, model []shardtest.Tensor, f kernel.Format,
	label string) func(shardtest.Tensor) kernel.MomentType {
	chosen := map[string]kernel.MomentType{}
	for _, p := range model {
		moments := f.Moments
		if rapid.IntRange(0, 3).Draw(t, label) == 0 {
			moments = rapid.SampledFrom([]kernel.MomentType{kernel.MomentsFP32, kernel.MomentsBF16,
				kernel.MomentsInt8}).Draw(t, label)
		}
		if !moments.Suits(f.Algorithm) {
			moments = f.Moments
		}
		chosen[p.Name] = moments
	}
	return func(p shardtest.Tensor) kernel.MomentType { return chosen[p.Name] }
}

// TestLoadIntoAnyCutAndFormat: the loaded state is the saved state, by name. It is
// rounded once if the format has fewer digits.
func TestLoadIntoAnyCutAndFormat(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		algorithm := rapid.SampledFrom([]kernel.Algorithm{kernel.Adam, kernel.Adam, kernel.Lion, kernel.Adagrad,
			kernel.SGD}).Draw(rt, "algorithm")
		model := drawModel(rt)
		chunk := rapid.IntRange(1, 600)
		from := drawFormat(rt, algorithm, "from")
		job := newJob(rt, from, chunk.Draw(rt, "chunk"),
			shardtest.CutModel(model, drawMoments(rt, model, from, "moments"), drawCuts(rt, model, "cuts")...))
		train(rt, job, rapid.Uint64().Draw(rt, "seed"), 2)
		directory := temporary(rt)
		save(rt, directory, job, "")

		shuffled := rapid.Permutation(model).Draw(rt, "other order")
		to := drawFormat(rt, algorithm, "to")
		others := newJob(rt, to, chunk.Draw(rt, "other chunk"),
			shardtest.CutModel(shuffled, drawMoments(rt, shuffled, to, "other moments"),
				drawCuts(rt, shuffled, "other cuts")...))
		load(rt, directory, others)
		compareValues(rt, job, others)
	})
}

func temporary(t *rapid.T) string {
	directory, err := os.MkdirTemp("", "plimsoll-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(directory) })
	return directory
}

// compareValues compares a loaded job with the saved one.
func compareValues(t shardtest.Failer, job, others []Shard) {
	t.Helper()
	want, got := values(job), values(others)
	held := map[string][]kernel.MomentType{} // of every element, where it came from
	for _, s := range job {
		for _, p := range s.Pieces {
			if held[p.Name] == nil {
				held[p.Name] = make([]kernel.MomentType, len(want[p.Name][0]))
			}
			for i := range p.Count {
				held[p.Name][p.First+i] = p.Moments
			}
		}
	}
	for _, s := range others {
		for _, p := range s.Pieces {
			for i := p.First; i < p.First+p.Count; i++ {
				compareElement(t, fmt.Sprintf("element %d of %s", i, p.Name), s.Format, held[p.Name][i], p.Moments,
					at(want[p.Name], i), at(got[p.Name], i))
			}
		}
		checkParameters(t, s)
	}
}

func at(streams [3][]float32, i int64) [3]float32 {
	return [3]float32{streams[0][i], streams[1][i], streams[2][i]}
}

// compareElement compares the master weight and the moments of an element with the saved
// ones.
func compareElement(t shardtest.Failer, name string, format kernel.Format, from, to kernel.MomentType, want,
	got [3]float32) {
	t.Helper()
	if format.State == kernel.Split24 {
		want[0] = kernel.RoundTo24(want[0])
	}
	if math.Float32bits(want[0]) != math.Float32bits(got[0]) {
		t.Fatalf("%s: the master weight is %x, and was %x", name, got[0], want[0])
	}
	for m := 1; m <= format.Algorithm.Moments(); m++ {
		switch to {
		case kernel.MomentsFP32:
			if math.Float32bits(want[m]) != math.Float32bits(got[m]) {
				t.Fatalf("%s: moment %d is %x, and was %x", name, m, got[m], want[m])
			}
		case kernel.MomentsBF16:
			if rounded := kernel.BF16ToFloat32(kernel.Float32ToBF16(want[m])); rounded != got[m] {
				t.Fatalf("%s: moment %d is %x, expected %x", name, m, got[m], rounded)
			}
		}
	}
	if to != kernel.MomentsInt8 {
		return
	}
	// The first moment has a step that grows with it, from 1/32 of the root of
	// the second; the root has at least 3 digits after the leading one, unless
	// it is far below the largest of its block.
	root, held := math.Sqrt(float64(want[2])), math.Sqrt(float64(got[2]))
	if held > root*17/16 || root > 0x1p-8 && held < root*15/16 {
		t.Fatalf("%s: the root of the second moment is %g, and was %g", name, held, root)
	}
	if unit := math.Max(root, math.Abs(float64(want[1]))); root > 0x1p-8 && math.Abs(float64(got[1]-want[1])) > unit/8 {
		t.Fatalf("%s: the first moment is %g, and was %g beside a root of %g", name, got[1], want[1], root)
	}
}

// checkParameters compares the trainer's parameters with the master weights.
func checkParameters(t shardtest.Failer, s Shard) {
	s.State.Each(func(at shard.Chunk, c kernel.Chunk) {
		for i, master := range c.Master {
			switch s.Format.Parameter {
			case dtype.BF16:
				if c.Parameter[i] != kernel.Float32ToBF16(master) {
					t.Fatalf("parameter %d is not the master weight, rounded", at.First+int64(i))
				}
			case dtype.F16:
				if c.Parameter[i] != kernel.Float32ToFP16(master) {
					t.Fatalf("parameter %d is not the master weight, rounded", at.First+int64(i))
				}
			}
		}
	})
}

// TestInt8BlocksStayAsTheyAre if a block is cut out of a larger shard.
func TestInt8BlocksStayAsTheyAre(t *testing.T) {
	f := shardtest.Format(kernel.Adam, kernel.Split, kernel.MomentsInt8, dtype.BF16)
	model := []shardtest.Tensor{{"a", []int64{512}, 0}, {"b", []int64{1024}, 0}, {"c", []int64{300}, 0}}
	job := newJob(t, f, 512, shardtest.CutModel(model, shardtest.Alike(kernel.MomentsInt8)))
	train(t, job, 3, 4)
	directory := t.TempDir()
	save(t, directory, job, "")
	others := newJob(t, f, 256, shardtest.CutModel(model, shardtest.Alike(kernel.MomentsInt8), 512, 1024))
	load(t, directory, others)
	var joined []byte
	for _, s := range others {
		joined = append(joined, s.State.Arena(ledger.MomentHeaders).Bytes()...)
	}
	if want := job[0].State.Arena(ledger.MomentHeaders).Bytes(); !slices.Equal(joined, want) {
		t.Errorf("headers %x, want %x", joined, want)
	}
	compareRaw(t, job, others, "exp_avg")
	compareRaw(t, job, others, "exp_avg_sq")
}

// TestInt8BlocksOfOtherElements: a block that is parts of two blocks of the file has values of both, which differ a
// thousandfold.
func TestInt8BlocksOfOtherElements(t *testing.T) {
	f := shardtest.Format(kernel.Adam, kernel.Split, kernel.MomentsInt8, dtype.BF16)
	model := []shardtest.Tensor{{"a", []int64{4 * kernel.Block}, 0}}
	job := newJob(t, f, 2*kernel.Block, shardtest.CutModel(model, shardtest.Alike(kernel.MomentsInt8)))
	train(t, job, 3, 1)
	var firsts, seconds []float32
	for i := range 4 * kernel.Block {
		root := math.Pow(1000, float64(i/kernel.Block)-2) * (1 + float64(i%7)/7)
		firsts, seconds = append(firsts, float32(root/2)), append(seconds, float32(root*root))
	}
	job[0].State.WriteMoment(0, 0, firsts)
	job[0].State.WriteMoment(1, 0, seconds)
	directory := t.TempDir()
	save(t, directory, job, "")
	others := newJob(t, f, 2*kernel.Block,
		shardtest.CutModel(model, shardtest.Alike(kernel.MomentsInt8), kernel.Block/2))
	load(t, directory, others)
	compareValues(t, job, others)
}

func compareRaw(t *testing.T, job, others []Shard, component ledger.Component) {
	var joined []byte
	for _, s := range others {
		joined = append(joined, s.State.Arena(component).Bytes()...)
	}
	if !slices.Equal(joined, job[0].State.Arena(component).Bytes()) {
		t.Errorf("%s has other codes", component)
	}
}

// TestLoadRefuses checkpoints that do not suit the shard, and does not change the state.
func TestLoadRefuses(t *testing.T) {
	directory := t.TempDir()
	job := newJob(t, shardtest.SplitFormat, 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 9000))
	train(t, job, 1, 1)
	save(t, directory, job, "")
	c, err := Open(directory)
	if err != nil {
		t.Fatal(err)
	}
	changed := func(change func(*shardtest.Tensor)) []shardtest.Tensor {
		model := slices.Clone(shardtest.SmallModel)
		change(&model[1])
		return model
	}
	for name, test := range map[string]struct {
		format kernel.Format
		model  []shardtest.Tensor
		says   []string
	}{
		"another name": {shardtest.SplitFormat,
			changed(func(p *shardtest.Tensor) { p.Name = "model.layers.0.k_proj.weight" }),
			[]string{directory, `no parameter "model.layers.0.k_proj.weight"`,
				`it has "model.layers.0.q_proj.weight"`}},
		"another shape": {shardtest.SplitFormat, changed(func(p *shardtest.Tensor) { p.Shape = []int64{32, 64} }),
			[]string{directory, `"model.layers.0.q_proj.weight" has the shape [64 32] there, expected [32 64]`}},
		"another optimizer": {shardtest.Format(kernel.Lion, kernel.Split, kernel.MomentsFP32, dtype.BF16),
			shardtest.SmallModel,
			[]string{directory, "the state of Adam, but the optimizer is Lion"}},
	} {
		t.Run(name, func(t *testing.T) {
			other := newJob(t, test.format, 700, shardtest.CutModel(test.model, shardtest.Alike(kernel.MomentsFP32)))
			train(t, other, 2, 1)
			before := bytesOfState(other[0])
			_, _, err := c.Load(t.Context(), other[0])
			shardtest.MustSay(t, err, test.says...)
			shardtest.EqualState(t, bytesOfState(other[0]), before)
		})
	}
}

// TestRanksMayHoldTheSame: then each rank loads its own.
func TestRanksMayHoldTheSame(t *testing.T) {
	pieces := shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32))[0]
	job := newJob(t, shardtest.SplitFormat, 700, [][]shard.Piece{pieces, pieces})
	train(t, job[:1], 1, 1)
	train(t, job[1:], 2, 1)
	directory := t.TempDir()
	save(t, directory, job, "")
	others := newJob(t, shardtest.SplitFormat, 700, [][]shard.Piece{pieces, pieces})
	load(t, directory, others)
	for rank := range job {
		shardtest.EqualState(t, bytesOfState(others[rank]), bytesOfState(job[rank]))
	}
}

func TestTrainingDocument(t *testing.T) {
	directory := t.TempDir()
	job := newJob(t, shardtest.SplitFormat, 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 9000))
	const document = `{"epoch":3,"seed":18446744073709551615,"text":"<&>"}`
	save(t, directory, job, document)
	c, err := Open(directory)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range newJob(t, shardtest.SplitFormat, 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 9000, 10000)) {
		if _, training, err := c.Load(t.Context(), s); err != nil || string(training) != document {
			t.Errorf("rank %d: %s, %v", s.Rank, training, err)
		}
	}
	if _, err := Save(directory, job[0], []byte(`{"epoch":`)); err == nil {
		t.Error("a training document that is no JSON was taken")
	}
}

func TestLoadIsInterrupted(t *testing.T) {
	directory := t.TempDir()
	job := newJob(t, shardtest.SplitFormat, 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32)))
	save(t, directory, job, "")
	train(t, job, 1, 1)
	before := bytesOfState(job[0])
	c, err := Open(directory)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := c.Load(ctx, job[0]); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want an interruption", err)
	}
	shardtest.EqualState(t, bytesOfState(job[0]), before)
}

// TestConvert writes a checkpoint again, and loads it.
func TestConvert(t *testing.T) {
	split, fp32, split24 := kernel.Split, kernel.FP32, kernel.Split24
	bf16, int8 := kernel.MomentsBF16, kernel.MomentsInt8
	large := append(slices.Clone(shardtest.SmallModel), shardtest.Tensor{"mlp.weight", []int64{70, 100}, 0})
	for name, test := range map[string]struct {
		from kernel.Format
		to   Conversion
	}{
		"as it is": {shardtest.SplitFormat, Conversion{}},
		"fp32":     {shardtest.SplitFormat, Conversion{State: &fp32}},
		"split": {shardtest.Format(kernel.Adam, kernel.FP32, kernel.MomentsBF16, dtype.F16),
			Conversion{State: &split}},
		"split24": {shardtest.SplitFormat, Conversion{State: &split24, Moments: &int8}},
		"from 24": {shardtest.Format(kernel.Adam, kernel.Split24, kernel.MomentsInt8, dtype.BF16),
			Conversion{State: &fp32}},
		"widened": {shardtest.Format(kernel.Adam, kernel.Split24, kernel.MomentsFP32, dtype.BF16),
			Conversion{State: &split}},
		"bf16":  {shardtest.SplitFormat, Conversion{Moments: &bf16, Ranks: 3}},
		"int8":  {shardtest.SplitFormat, Conversion{Moments: &int8, Ranks: 1}},
		"ranks": {shardtest.Format(kernel.SGD, kernel.FP32, kernel.MomentsFP32, dtype.F32), Conversion{Ranks: 5}},
	} {
		t.Run(name, func(t *testing.T) {
			job := newJob(t, test.from, 700, shardtest.CutModel(large, shardtest.Alike(test.from.Moments), 9000, 11700))
			train(t, job, 4, 2)
			c, err := Open(save(t, t.TempDir(), job, `{"epoch":1}`))
			if err != nil {
				t.Fatal(err)
			}
			out := filepath.Join(t.TempDir(), "new")
			path, err := c.Convert(t.Context(), out, test.to, nil)
			if err != nil {
				t.Fatal(err)
			}
			converted, err := Open(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := converted.Verify(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			if want := max(test.to.Ranks, 3); test.to.Ranks > 0 && converted.World() != test.to.Ranks ||
				test.to.Ranks == 0 && converted.World() != want {
				t.Errorf("%d ranks", converted.World())
			}
			loaded := newJob(t, converted.files[0].layout.Format, 700, pieces(converted))
			load(t, path, loaded)
			compareValues(t, job, loaded)
			if name == "as it is" {
				for rank := range job {
					shardtest.EqualState(t, bytesOfState(loaded[rank]), bytesOfState(job[rank]))
				}
			}
			_, err = c.Convert(t.Context(), out, test.to, nil)
			shardtest.MustSay(t, err, path, "here already")
		})
	}
}

// TestConvertAfterAConversionThatWasKilled: the leftovers of the conversion of another
// file are no part of this one, whether they are finished or not.
func TestConvertAfterAConversionThatWasKilled(t *testing.T) {
	cuts := shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32))
	job, other := newJob(t, shardtest.SplitFormat, 700, cuts),
		newJob(t, shardtest.SplitFormat, 700,
			shardtest.CutModel([]shardtest.Tensor{{"other", []int64{7}, 0}}, shardtest.Alike(kernel.MomentsFP32)))
	other[0].Part = "torch"
	c, err := Open(save(t, t.TempDir(), job, ""))
	if err != nil {
		t.Fatal(err)
	}
	for _, finished := range []bool{true, false} {
		out := t.TempDir()
		w := newTestWriter(t, out, other[0])
		if err := writeAll(w, other[0]); err != nil {
			t.Fatal(err)
		}
		if finished {
			err = w.finish()
		} else {
			err = errors.Join(w.back.close(), w.file.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
		path, err := c.Convert(t.Context(), out, Conversion{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		converted, err := Open(path)
		if err != nil || len(converted.names) != len(shardtest.SmallModel) {
			t.Errorf("the parameters are %v (%v), those of the other file among them", converted.names, err)
		}
	}
}

// TestConvertBesideASave: files that a job is saving are no leftovers, and no part of the
// conversion that finds them.
func TestConvertBesideASave(t *testing.T) {
	job := newJob(t, shardtest.SplitFormat, 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 9000))
	c, err := Open(save(t, t.TempDir(), job, ""))
	if err != nil {
		t.Fatal(err)
	}
	for name, meanwhile := range map[string]bool{"begun before": false, "begun meanwhile": true} {
		t.Run(name, func(t *testing.T) {
			out := t.TempDir()
			var w *writer
			begin := sync.OnceFunc(func() { w = newTestWriter(t, out, job[1]) })
			if !meanwhile {
				begin()
			}
			_, err = c.Convert(t.Context(), out, Conversion{}, func(int64) { begin() })
			shardtest.MustSay(t, err, "another job is saving the same step", w.path(dataSuffix))
			if err := errors.Join(writeAll(w, job[1]), w.finish()); err != nil {
				t.Fatal(err)
			}
			w = newTestWriter(t, out, job[0])
			if err := errors.Join(writeAll(w, job[0]), w.finish()); err != nil {
				t.Fatal(err)
			}
			if _, err := Commit(out, c.Step(), ""); err != nil {
				t.Error(err)
			}
		})
	}
}

// pieces returns the pieces of all ranks of a checkpoint.
func pieces(c *Checkpoint) [][]shard.Piece {
	var ranks [][]shard.Piece
	for _, f := range c.files {
		ranks = append(ranks, f.layout.pieces)
	}
	return ranks
}

// TestInt8IsForWhatIsLarge: conversions keep embeddings and small parameters in
// fp32.
func TestInt8IsForWhatIsLarge(t *testing.T) {
	int8 := kernel.MomentsInt8
	to := Conversion{Moments: &int8}
	for name, want := range map[string]kernel.MomentType{"mlp.weight": kernel.MomentsInt8,
		"model.embed_tokens.weight": kernel.MomentsFP32} {
		if got := to.momentsOf(shard.Piece{Name: name, Shape: []int64{70, 100}}); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	if got := to.momentsOf(shard.Piece{Name: "mlp.weight", Shape: []int64{63, 65}}); got != kernel.MomentsFP32 {
		t.Errorf("a small parameter: %v", got)
	}
}
