//go:build linux

package service

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
	"plimsoll/internal/state/shard"
)

// formats returns documents of every format.
func formats() []*protocol.Document {
	var all []*protocol.Document
	for _, optimizer := range []string{"adamw", "adam", "lion", "adagrad", "sgd"} {
		for _, state := range kernel.StateNames() {
			for _, moments := range kernel.MomentNames() {
				for _, parameter := range []string{"bf16", "fp16", "fp32"} {
					for _, gradient := range []string{"bf16", "fp16", "fp32"} {
						d := testDocument(func(d *protocol.Document) {
							d.Optimizer, d.State, d.Moments, d.Parameter, d.Gradient = optimizer, state, moments,
								parameter, gradient
							d.Parameters = []protocol.Piece{
								{Name: "embed", Shape: []int64{70, 1000}, First: 3, Count: 69_001, Moments: "fp32"},
								{Name: "norm", Shape: []int64{77}, Group: 1, Count: 77},
								{Name: "mlp", Shape: []int64{9_001}, Count: 9_001},
							}
						})
						if _, err := d.Format(); err == nil {
							all = append(all, d)
						}
					}
				}
			}
		}
	}
	return all
}

// formatName names the format of a document.
func formatName(d *protocol.Document) string {
	return fmt.Sprintf("%s-%s-%s-%s-%s", d.Optimizer, d.State, d.Moments, d.Parameter, d.Gradient)
}

// hyperparametersOf returns hyperparameters for the groups of a test document.
func hyperparametersOf(optimizer string) []protocol.Hyperparameters {
	switch optimizer {
	case "lion":
		return []protocol.Hyperparameters{{1e-4, 0.9, 0.99, 0, 0.1}, {1e-5, 0.9, 0.95, 0, 0}}
	case "adagrad":
		return []protocol.Hyperparameters{{1e-2, 0, 0, 1e-10, 0.1, 1e-3}, {1e-3, 0, 0, 1e-8, 0, 0}}
	case "sgd":
		return []protocol.Hyperparameters{{1e-2, 0.9, 0, 0, 0.1, 0, 1}, {1e-3, 0.8, 0, 0, 0, 0.5, 0}}
	}
	return adamw
}

// engineOf returns a shard in this process, of the same format.
func engineOf(t testing.TB, d *protocol.Document, cpus []int) *engine.Shard {
	t.Helper()
	set, err := kernel.Select()
	if err != nil {
		t.Fatal(err)
	}
	config, err := shardConfig(d, set, arena.BasePages, cpus)
	if err != nil {
		t.Fatal(err)
	}
	shard, err := engine.NewShard(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shard.Close() })
	return shard
}

// streamsOf reads all streams of a session, in several ranges.
func streamsOf(t testing.TB, s *servicetest.Session, algorithm kernel.Algorithm) [][]float32 {
	t.Helper()
	all := make([][]float32, 1+algorithm.Moments())
	for stream := range all {
		all[stream] = make([]float32, s.Welcome.Elements)
		const piece = 33_333
		for first := 0; first < len(all[stream]); first += piece {
			if err := s.Read(stream, int64(first), all[stream][first:min(first+piece, len(all[stream]))]); err != nil {
				t.Fatal(err)
			}
		}
	}
	return all
}

// sameState checks that a session and a shard of this process have the same bits.
func sameState(t testing.TB, s *servicetest.Session, held *engine.Shard) {
	t.Helper()
	format := held.Config().Format
	got := streamsOf(t, s, format.Algorithm)
	want := make([][]float32, len(got))
	for stream := range want {
		want[stream] = make([]float32, s.Welcome.Elements)
	}
	held.Each(func(at shard.Chunk, c kernel.Chunk) {
		for i := range c.Len() {
			want[protocol.MasterWeights][at.First+int64(i)] = c.MasterWeight(format, i)
			for moment := range format.Algorithm.Moments() {
				want[protocol.FirstMoment+moment][at.First+int64(i)] = c.Moment(moment, i)
			}
		}
	})
	for stream := range want {
		for i, w := range want[stream] {
			if math.Float32bits(got[stream][i]) != math.Float32bits(w) {
				t.Fatalf("stream %d: element %d is %g, and the engine has %g", stream, i, got[stream][i], w)
			}
		}
	}
	own := held.Arena(ledger.Parameters)
	if own == nil {
		own = held.Arena(ledger.MasterWeights)
	}
	if !bytes.Equal(s.Parameters.Bytes(), own.Bytes()) {
		t.Fatal("the parameters that the trainer sees are others than the engine's")
	}
}

// TestEveryFormat writes, reads and updates state of every format, and compares it with
// an engine in this process.
func TestEveryFormat(t *testing.T) {
	r := startService(t)
	all := formats()
	if len(all) < 60 {
		t.Fatalf("only %d formats", len(all))
	}
	cpus := r.cpus(t)
	random := rand.New(rand.NewPCG(5, 5))
	for i, d := range all {
		if testing.Short() && i%7 != 0 {
			continue
		}
		t.Run(formatName(d), func(t *testing.T) {
			s := mustOpen(t, r.Socket, d)
			shard := engineOf(t, d, cpus)
			writeStreams(t, s, shard, random)
			if err := s.SetStep(7); err != nil {
				t.Fatal(err)
			}
			shard.SetSteps(7)
			sameState(t, s, shard)
			for step := int64(8); step <= 10; step++ {
				putGradients(s, step, 0, s.Welcome.Elements)
				copy(shard.Arena(ledger.Gradients).Bytes(), s.Gradients.Bytes())
				sum, err := s.SumSquares()
				if want := shard.SumSquares(); err != nil || sum != want {
					t.Fatalf("the sum of squares is %g, want %g (%v)", sum, want, err)
				}
				groups := hyperparametersOf(d.Optimizer)
				var optimizers []optim.Optimizer
				for _, g := range groups {
					optimizers = append(optimizers, optimizerOf(d, g))
				}
				if err := s.Step(step, 0.25, step%2 == 0, groups...); err != nil {
					t.Fatal(err)
				}
				if seconds, err := s.Wait(step, 0, s.Welcome.Elements); err != nil || seconds <= 0 {
					t.Fatalf("a finished step took %v s (%v)", seconds, err)
				}
				if err := shard.Begin(step, 0.25, optimizers); err != nil {
					t.Fatal(err)
				}
				shard.Wait()
			}
			sameState(t, s, shard)
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// cpus returns the CPUs of a session of a job with one rank.
func (r *running) cpus(t *testing.T) []int {
	t.Helper()
	s := mustOpen(t, r.Socket, testDocument(small))
	cpus := r.overview(t).Sessions[0].CPUs
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return cpus
}

// writeStreams writes the same state to a session, in several ranges, and to a shard of
// this process. It also writes parts of blocks of int8 moments.
func writeStreams(t *testing.T, s *servicetest.Session, held *engine.Shard, random *rand.Rand) {
	t.Helper()
	format := held.Config().Format
	values := make([][]float32, 1+format.Algorithm.Moments())
	for stream := len(values) - 1; stream >= 0; stream-- { // the second moment first
		values[stream] = make([]float32, s.Welcome.Elements)
		for i := range values[stream] {
			x := random.NormFloat64() * 0.01
			if stream == protocol.FirstMoment && protocol.SecondMoment < len(values) { // at most its root, as with Adam
				x = math.Sqrt(float64(values[protocol.SecondMoment][i])) * (2*random.Float64() - 1)
			}
			if stream == protocol.SecondMoment || format.Algorithm == kernel.Adagrad && stream == protocol.FirstMoment {
				x *= x
			}
			values[stream][i] = float32(x)
		}
		const piece = 40_003 // not a whole number of blocks
		for first := 0; first < len(values[stream]); first += piece {
			if err := s.Write(stream, int64(first),
				values[stream][first:min(first+piece, len(values[stream]))]); err != nil {
				t.Fatal(err)
			}
		}
	}
	got := streamsOf(t, s, format.Algorithm)
	held.Each(func(at shard.Chunk, c kernel.Chunk) {
		n := c.Len()
		for i := range n {
			c.PutMasterWeight(format, i, values[protocol.MasterWeights][at.First+int64(i)])
		}
		if c.Headers == nil {
			for stream := protocol.FirstMoment; stream < len(values); stream++ {
				for i := range n {
					c.Moments[stream-protocol.FirstMoment].Put(i, values[stream][at.First+int64(i)])
				}
			}
			return
		}
		for block := 0; block*kernel.Block < n; block++ {
			at, end := at.First+int64(block*kernel.Block), at.First+int64(min(n, (block+1)*kernel.Block))
			var of [2][]float32
			for moment := range of {
				of[moment] = make([]float32, end-at)
				if stream := protocol.FirstMoment + moment; stream < len(values) {
					copy(of[moment], got[stream][at:end])
				}
			}
			c.PutBlock(block, of[0], of[1])
		}
	})
	// What was read is what was written, as far as the format holds it.
	for stream := range values {
		worst := 0.0
		for i, x := range values[stream] {
			worst = max(worst, math.Abs(float64(got[stream][i]-x)))
		}
		limit := map[kernel.MomentType]float64{kernel.MomentsFP32: 0, kernel.MomentsBF16: 3e-4,
			kernel.MomentsInt8: 4e-3}[format.Moments]
		if stream == protocol.MasterWeights {
			limit = map[kernel.State]float64{kernel.Split24: 2e-6}[format.State]
		}
		if worst > limit {
			t.Errorf("stream %d was read %g beside what was written: expected at most %g", stream, worst, limit)
		}
	}
}

// TestNormWithAnyCut marks gradients as ready in all kinds of ranges: the norm always
// has the same bits.
func TestNormWithAnyCut(t *testing.T) {
	s := begun(t, startService(t).Socket, testDocument())
	putGradients(s, 1, 0, testElements)
	want, err := s.SumSquares()
	if err != nil || want == 0 {
		t.Fatalf("%g, %v", want, err)
	}
	random := rand.New(rand.NewPCG(2, 2))
	for range 200 {
		for range random.IntN(6) {
			first := random.Int64N(testElements)
			count := 1 + random.Int64N(testElements-first)
			if random.IntN(3) == 0 { // write other gradients first, then the right ones
				putGradients(s, 2, first, first+count)
				if err := s.Ready(first, count); err != nil {
					t.Fatal(err)
				}
				putGradients(s, 1, first, first+count)
			}
			if err := s.Ready(first, count); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := s.SumSquares(); err != nil || math.Float64bits(got) != math.Float64bits(want) {
			t.Fatalf("the sum is %x, want %x (%v)", math.Float64bits(got), math.Float64bits(want), err)
		}
	}
}

// TestAccumulate adds numbers of every type to gradients of every type.
func TestAccumulate(t *testing.T) {
	r := startService(t)
	for _, gradient := range protocol.NumberTypes {
		for number, of := range protocol.NumberTypes {
			t.Run(fmt.Sprintf("%v to %v", of, gradient), func(t *testing.T) {
				s := begun(t, r.Socket, testDocument(small, func(d *protocol.Document) {
					d.State, d.Gradient = "fp32", gradient.String()
				}))
				putGradients(s, 1, 0, s.Welcome.Elements)
				const first, count, offset = 1001, 40_000, 64
				want := kernel.Array{Type: gradient, Data: bytes.Clone(s.Gradients.Bytes())}
				added := kernel.Array{Type: of, Data: s.Window.Bytes()[offset : offset+count*of.Size()]}
				for i := range count {
					added.Put(i, float32(math.Sin(float64(i))))
				}
				for n := range uint64(2) {
					kernel.Generic.Accumulate(want.Slice(first, first+count), added)
					for range 2 { // the second request must not add again
						if err := s.Do(protocol.Accumulate,
							protocol.Encode(protocol.AccumulateBody{Type: uint32(number), First: first, Count: count,
								Offset: offset,
								Number: 1 + n})); err != nil {
							t.Fatal(err)
						}
					}
				}
				if !bytes.Equal(s.Gradients.Bytes(), want.Data) {
					t.Error("the gradients are others than the reference has")
				}
				if err := s.ClearGradients(); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(s.Gradients.Bytes(), make([]byte, len(want.Data))) {
					t.Error("the gradients are not cleared")
				}
				if err := s.Accumulate(1, 5, []float32{1, -2}); err != nil {
					t.Fatal(err)
				}
				if sum, err := s.SumSquares(); err != nil || sum != 5 {
					t.Errorf("the sum of squares is %g, want 5 (%v)", sum, err)
				}
				if err := s.Close(); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// TestPipelinedRequests sends requests without waiting for answers. The service answers
// in order, and each request has the effect that it has alone.
func TestPipelinedRequests(t *testing.T) {
	r := startService(t)
	s := begun(t, r.Socket, testDocument())
	putGradients(s, 1, 0, testElements)
	step := func(n uint64, flags uint32) protocol.Packet {
		return protocol.Packet{Kind: protocol.Step,
			Body: protocol.StepBody{StepHeader: protocol.StepHeader{Step: n, GradScale: 0.5, Flags: flags},
				Hyperparameters: adamw}.Encode()}
	}
	var sent []protocol.Packet
	for round := range uint64(20) {
		for _, p := range []protocol.Packet{
			{Kind: protocol.Ready, Body: protocol.Encode(protocol.RangeBody{First: 0, Count: testElements / 2})},
			{Kind: protocol.Norm},
			step(2*round+1, 0),
			{Kind: protocol.Wait, Body: protocol.Encode(protocol.WaitBody{Step: 2*round + 1, First: 0, Count: 1000})},
			step(2*round+2, protocol.WaitForStep),
			step(2*round+9, 0), // not the next step
			{Kind: protocol.Read, Body: protocol.Encode(protocol.TransferBody{Count: 10})},
		} {
			p.Number = uint32(1000 + len(sent))
			if err := protocol.WritePacket(s.Conn, p.Encode()); err != nil {
				t.Fatal(err)
			}
			sent = append(sent, p)
		}
	}
	var norm []byte
	for i, p := range sent {
		data, _, err := protocol.ReadPacket(s.Conn, make([]byte, protocol.MaximumPacket))
		if err != nil {
			t.Fatal(err)
		}
		result, err := protocol.ParseAnswer(data, p)
		if i%7 == 5 {
			wantError(t, err, protocol.OutOfOrder,
				fmt.Sprintf("step %d: the session has finished step %d, so the next is %d",
					2*(i/7)+9, 2*(i/7)+2, 2*(i/7)+3))
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if p.Kind == protocol.Norm {
			if norm != nil && !bytes.Equal(norm, result) {
				t.Errorf("the norm is %x, and was %x", result, norm)
			}
			norm = result
		}
	}
	got := fingerprint(t, s)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	one := begun(t, r.Socket, testDocument())
	putGradients(one, 1, 0, testElements)
	for n := int64(1); n <= 40; n++ {
		if err := one.Step(n, 0.5, true, adamw...); err != nil {
			t.Fatal(err)
		}
		if err := one.Step(n, 0.5, true, adamw...); err != nil { // repeated: not made again
			t.Fatal(err)
		}
	}
	if want := fingerprint(t, one); got != want {
		t.Errorf("the state is %s, want %s", got, want)
	}
}

// TestSaveAndLoad saves the state of a job of two ranks, and loads it into a job of
// three ranks, with another format, on another service.
func TestSaveAndLoad(t *testing.T) {
	model := []protocol.Piece{{Name: "embed", Shape: []int64{300, 100}}, {Name: "norm", Shape: []int64{777}, Group: 1},
		{Name: "mlp", Shape: []int64{20_000}}}
	const elements = 30_000 + 777 + 20_000
	job := func(world int, change func(*protocol.Document)) []*protocol.Document {
		var ranks []*protocol.Document
		for rank := range world {
			d := testDocument(change, func(d *protocol.Document) {
				d.World, d.LocalWorld, d.Rank, d.Parameters = world, world, rank, nil
			})
			first, end := int64(elements*rank/world), int64(elements*(rank+1)/world)
			at := int64(0)
			for _, p := range model {
				whole := p.Shape[0]
				if len(p.Shape) > 1 {
					whole *= p.Shape[1]
				}
				if from, to := max(first, at), min(end, at+whole); from < to {
					p.First, p.Count = from-at, to-from
					d.Parameters = append(d.Parameters, p)
				}
				at += whole
			}
			used := map[int]bool{}
			for _, p := range d.Parameters {
				used[p.Group] = true
			}
			d.Groups = len(used)
			ranks = append(ranks, d)
		}
		return ranks
	}
	directory := t.TempDir()
	r := startService(t)
	var want [3][]float32
	for _, d := range job(2, func(*protocol.Document) {}) {
		s := begun(t, r.Socket, d)
		for step := int64(1); step <= 3; step++ {
			putGradients(s, step, 0, s.Welcome.Elements)
			if err := s.Step(step, 1, true, adamw[:d.Groups]...); err != nil {
				t.Fatal(err)
			}
		}
		if step, err := s.Save(directory, jsontext.Value(fmt.Sprintf(`{"epoch": 3, "rank": %d}`,
			d.Rank))); err != nil || step != 3 {
			t.Fatalf("step %d is saved: expected 3 (%v)", step, err)
		}
		wantStreams := streamsOf(t, s, kernel.Adam)
		for stream := range want {
			want[stream] = append(want[stream], wantStreams[stream]...)
		}
		// A step while it is written does not change what is saved.
		if err := s.Step(4, 1, true, adamw[:d.Groups]...); err != nil {
			t.Fatal(err)
		}
		if step, err := s.Saved(); err != nil || step != 3 {
			t.Fatalf("step %d was saved: expected 3 (%v)", step, err)
		}
		if d.Rank == 1 {
			if err := s.Commit(directory, 3); err != nil {
				t.Fatal(err)
			}
		}
		if status := r.overview(t).Sessions[d.Rank]; status.SavedStep != 3 || status.Saving || status.Step != 4 {
			t.Errorf("stat says step %d, saved %d, saving %v", status.Step, status.SavedStep, status.Saving)
		}
	}
	other := startService(t)
	at := 0
	for _, d := range job(3, func(d *protocol.Document) {
		d.State, d.Moments, d.Parameter, d.Gradient = "fp32", "bf16", "fp16", "fp16"
	}) {
		s := mustOpen(t, other.Socket, d)
		body, err := json.Marshal(protocol.LoadBody{Directory: directory})
		if err != nil {
			t.Fatal(err)
		}
		result, _, err := s.Call(protocol.Load, body)
		if err != nil {
			t.Fatal(err)
		}
		if step, training := binary.LittleEndian.Uint64(result), string(result[8:]); step != 3 ||
			training != fmt.Sprintf(`{"epoch":3,"rank":%d}`, d.Rank%2*min(d.Rank, 1)) {
			t.Errorf("rank %d: step %d, %s", d.Rank, step, training)
		}
		got := streamsOf(t, s, kernel.Adam)
		for stream := range got {
			for i, x := range got[stream] {
				w := want[stream][at+i]
				if limit := math.Abs(float64(w)) / 250; stream == protocol.MasterWeights && x != w ||
					math.Abs(float64(x-w)) > limit {
					t.Fatalf("rank %d, stream %d: element %d is %g, want %g", d.Rank, stream, i, x, w)
				}
			}
		}
		at += len(got[0])
		half := kernel.Array{Type: dtype.F16, Data: make([]byte, 2)}
		seen := kernel.Array{Type: half.Type, Data: s.Parameters.Bytes()}
		for i, w := range got[protocol.MasterWeights] {
			if half.Put(0, w); half.At(0) != seen.At(i) {
				t.Fatalf("the parameter of element %d is %g, want %g", i, seen.At(i), half.At(0))
			}
		}
		if err := s.Step(4, 1, true, adamw[:d.Groups]...); err != nil {
			t.Errorf("the step after: %v", err)
		}
	}
	if at != elements {
		t.Errorf("%d elements were loaded, of %d", at, elements)
	}
}

// TestAnswersComeInOrder asks for the overview while the client waits for the end of a
// step. The answer to the step comes first, as it was asked for first.
func TestAnswersComeInOrder(t *testing.T) {
	s := begun(t, startService(t).Socket, testDocument(of(4<<20)))
	for step := uint64(1); step <= 5; step++ {
		requests := []protocol.Packet{
			{Kind: protocol.Step, Number: 1, Body: protocol.StepBody{StepHeader: protocol.StepHeader{Step: step,
				GradScale: 1, Flags: protocol.WaitForStep},
				Hyperparameters: adamw[:1]}.Encode()},
			{Kind: protocol.Stat, Number: 2},
		}
		for _, p := range requests {
			if err := protocol.WritePacket(s.Conn, p.Encode()); err != nil {
				t.Fatal(err)
			}
		}
		for _, p := range requests {
			data, files, err := protocol.ReadPacket(s.Conn, make([]byte, protocol.MaximumPacket))
			if err == nil {
				protocol.CloseAll(files)
				_, err = protocol.ParseAnswer(data, p)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
}
