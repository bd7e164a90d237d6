package roads

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"

	"plimsoll/internal/base/ledger"
)

// adamW returns parameters of an AdamW with split master weights beside bf16 parameters: 10 bytes a parameter.
func adamW(sizes ...int64) []Parameter {
	list := make([]Parameter, len(sizes))
	for i, n := range sizes {
		list[i] = Parameter{Elements: n, States: []int64{4 * n, 4 * n}, Master: 2 * n, Own: 2 * n, Gradient: 2 * n,
			Staying: 4 * n}
	}
	return list
}

// TestLayout divides parameters into chunks and adds up the arenas.
func TestLayout(t *testing.T) {
	const n = 1 << 10 // 10 KiB of state and 12 KiB of region
	l := NewLayout(adamW(n, n, 10*n, n, n, n), Settings{ChunkBytes: 25 << 10, Fraction: 1, Recovery: true})
	var states []ledger.Bytes
	for _, c := range l.Chunks {
		states = append(states, c.State)
	}
	if want := []ledger.Bytes{20 << 10, 100 << 10, 20 << 10, 10 << 10}; !equal(states, want) {
		t.Fatalf("chunks of %v, want %v", states, want)
	}
	for _, figure := range []struct {
		what      string
		got, want ledger.Bytes
	}{
		{"state", l.State(), 150 << 10}, {"gap", l.Gap(), 120 << 10}, {"arena", l.Arena(), (180 + 120) << 10},
		{"gradients", l.Gradients(), 30 << 10}, {"slot", l.Slot(), 100 << 10},
		{"window", l.Window(false), 200 << 10}, {"window of mode whole", l.Window(true), 150 << 10},
		{"freed", l.Freed(false), 0}, {"freed in mode whole", l.Freed(true), 150 << 10},
	} {
		if figure.got != figure.want {
			t.Errorf("%s: %d bytes, want %d", figure.what, figure.got, figure.want)
		}
	}
	whole := NewLayout(adamW(n, n), Settings{Whole: true, ChunkBytes: 1, Fraction: 1, Recovery: true})
	if len(whole.Chunks) != 1 || whole.Arena() != 2*24<<10 || whole.Gradients() != 0 {
		t.Errorf("mode whole with recovery: %d regions in %v", len(whole.Chunks), whole.Arena())
	}
	half := NewLayout(adamW(n, n, n, n, n), Settings{ChunkBytes: 1, Fraction: 0.5})
	if len(half.Chunks) != 3 || half.Resident != 8<<10 || half.Gradients() != 0 || half.Gap() != 10<<10 {
		t.Errorf("half of five: %d chunks and %v on the GPU", len(half.Chunks), half.Resident)
	}
}

func equal(a, b []ledger.Bytes) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

// TestChunked has pipelines that are worked out by hand. A chunk of 8 bytes is one piece of a byte eight times; the
// link moves 8 bytes a second, so that a chunk takes a second each way.
func TestChunked(t *testing.T) {
	chunks := func(count int, update time.Duration, own ledger.Bytes) []Work {
		list := make([]Work, count)
		for i := range list {
			list[i] = Work{In: 8, Out: 8, Own: own, Update: update}
		}
		return list
	}
	const s = time.Second
	for _, test := range []struct {
		name          string
		chunks        []Work
		gradients     ledger.Bytes
		link          Link
		updated, left time.Duration
	}{
		{"no chunk", nil, 0, Link{In: 8, Out: 8}, 0, 0},
		{"one chunk: in, update, out", chunks(1, 2*s, 0), 0, Link{In: 8, Out: 8}, 3 * s, 4 * s},
		{"three streams at a time", chunks(6, 0, 0), 0, Link{In: 8, Out: 8}, 6 * s, 7 * s},
		{"the update is slowest", chunks(5, 3*s, 0), 0, Link{In: 8, Out: 8}, 16 * s, 17 * s},
		// The last piece of a chunk comes in an eighth of a second behind the last one of the chunk two before it.
		{"copies out are slowest", chunks(5, 0, 0), 0, Link{In: 8, Out: 4}, 7*s + s/8, 11 * s},
		{"both directions share the link", chunks(1, 0, 0), 8, Link{In: 8, Out: 8, Together: 8}, 2 * s, 3 * s},
		{"an update and a region wait for the gradients", chunks(1, 0, 0), 32, Link{In: 8, Out: 8}, 4 * s, 5 * s},
		{"the parameters leave, too", chunks(1, 0, 8), 0, Link{In: 8, Out: 8}, 1 * s, 3 * s},
	} {
		if len(test.chunks) > 0 {
			test.chunks[0].Gradients = test.gradients
		}
		got := Chunked(test.chunks, test.link)
		if (got.Updated-test.updated).Abs() > 10 || (got.Left-test.left).Abs() > 10 {
			t.Errorf("%s: %v, want {%v %v}", test.name, got, test.updated, test.left)
		}
	}
}

// TestReady: with recovery the trainer waits for the last parameters, which leave before the states of their chunk.
func TestReady(t *testing.T) {
	link, chunk := Link{In: 8, Out: 8}, Work{In: 8, Out: 8, Own: 4}
	if got := Chunked([]Work{chunk}, link); got.Ready != 1500*time.Millisecond || got.Left != 2500*time.Millisecond {
		t.Errorf("mode chunked: %v", got)
	}
	if got := Whole([]Work{chunk}, link, 0); got.Ready != 1500*time.Millisecond ||
		got.Left != 2500*time.Millisecond {
		t.Errorf("mode whole: %v", got)
	}
	chunk.Own = 0
	if got := Chunked([]Work{chunk, chunk}, link); got.Ready != got.Updated {
		t.Errorf("without recovery: %v", got)
	}
}

// TestChunkedIsBound: a step takes no less than each of its three parts, and no more than all of them after one
// another. With equal chunks it takes what the slowest part takes, and two chunks of the others to begin and to end.
func TestChunkedIsBound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		link := Link{In: rapid.Float64Range(1e9, 500e9).Draw(t, "in"),
			Out: rapid.Float64Range(1e9, 500e9).Draw(t, "out")}
		size := rapid.Int64Range(0, 1<<28).Draw(t, "bytes")
		own := ledger.Bytes(rapid.Int64Range(0, 1<<27).Draw(t, "own"))
		update := time.Duration(rapid.Int64Range(0, int64(100*time.Millisecond)).Draw(t, "update"))
		gradients := ledger.Bytes(rapid.Int64Range(0, 1<<30).Draw(t, "gradients"))
		chunks := make([]Work, rapid.IntRange(1, 40).Draw(t, "chunks"))
		for i := range chunks {
			chunks[i] = Work{In: ledger.Bytes(size), Out: ledger.Bytes(size), Own: own, Update: update}
		}
		chunks[0].Gradients = gradients
		n := float64(len(chunks))
		in, out := n*float64(size)/link.In, (n*float64(size+int64(own))+float64(gradients))/link.Out
		got := Chunked(chunks, link)
		slowest := max(in, out, n*update.Seconds())
		few := float64(size)/link.In*3 + float64(size+int64(own))/link.Out*3 + 3*update.Seconds() +
			float64(gradients)/link.Out
		if end := got.Left.Seconds(); end < slowest-1e-6 || end > slowest+few+1e-6 || got.Updated > got.Left {
			t.Fatalf("%v, but in %g s, out %g s, update %g s", got, in, out, n*update.Seconds())
		}
		whole := Whole(chunks, link, 0)
		if gradients == 0 && whole.Left < got.Left-time.Duration(1000) {
			t.Fatalf("mode whole ends at %v, mode chunked at %v", whole.Left, got.Left)
		}
		link.Together = rapid.Float64Range(1e9, 1000e9).Draw(t, "together")
		if slow := Chunked(chunks, link); slow.Left < got.Left-time.Duration(1000) &&
			link.Together >= max(link.In, link.Out) {
			t.Fatalf("%v with a shared link, %v without", slow, got)
		}
	})
}

// TestNoLinkHangs: neither a link that moves nothing nor directions of very different speeds keep the law from an end.
func TestNoLinkHangs(t *testing.T) {
	chunks := make([]Work, 40)
	for i := range chunks {
		chunks[i] = Work{In: 64 << 20, Out: 64 << 20, Own: 13 << 20, Gradients: 13 << 20, Update: 29 * time.Millisecond}
	}
	for _, link := range []Link{{}, {In: 1e9}, {Out: 1e9}, {In: math.NaN(), Out: 1}} {
		if got := Chunked(chunks, link); got.Left != forever {
			t.Errorf("%+v: %+v", link, got)
		}
	}
	slow := Chunked(chunks, Link{In: 1e-6, Out: 1e15})
	if slow.Left != forever {
		t.Errorf("a year for each byte: %+v", slow)
	}
	got := Chunked(chunks, Link{In: 1e7, Out: 1e15})
	if want := float64(40*64<<20)/1e7 + 0.029; math.Abs(got.Left.Seconds()/want-1) > 1e-6 {
		t.Errorf("%+v, want %g s", got, want)
	}
}

// TestChunkedBySteps compares the law with a simulation of its own kind: time goes on in small steps, and streams do
// what the client gives them (python/plimsoll/torch/cycle.py), in its order and behind its events.
func TestChunkedBySteps(t *testing.T) {
	const tick = 1e-3
	rapid.Check(t, func(t *rapid.T) {
		small := func(name string) ledger.Bytes { return ledger.Bytes(rapid.IntRange(0, 4).Draw(t, name)) }
		recovery := rapid.Bool().Draw(t, "recovery")
		chunks := make([]Work, rapid.IntRange(1, 5).Draw(t, "chunks"))
		slot := ledger.Bytes(0)
		for i := range chunks {
			size := 8 * small("size")
			chunks[i] = Work{In: size, Out: size, Update: time.Duration(small("update")) * 250 * time.Millisecond}
			if recovery {
				chunks[i].Own, chunks[i].Gradients = 1+small("own"), small("gradients")
			}
			slot = max(slot, size)
		}
		rate := func(name string) float64 { return float64(rapid.IntRange(4, 32).Draw(t, name)) }
		link := Link{In: rate("in"), Out: rate("out")}
		if rapid.Bool().Draw(t, "shared") {
			link.Together = rate("both")
		}
		want := byTicks(chunks, slot, link, tick)
		got := Chunked(chunks, link)
		slack := 60 * len(chunks) // a task may end within a tick
		for _, pair := range [][2]float64{{got.Updated.Seconds(), want[0]}, {got.Ready.Seconds(), want[1]},
			{got.Left.Seconds(), want[2]}} {
			if math.Abs(pair[0]-pair[1]) > tick*float64(slack) {
				t.Fatalf("%+v, want %v", got, want)
			}
		}
	})
}

// byTicks returns when all is updated, when the trainer goes on, and when all has left.
func byTicks(chunks []Work, slot ledger.Bytes, link Link, tick float64) [3]float64 {
	type item struct {
		what  string
		chunk int
		piece ledger.Bytes
	}
	done := map[item]float64{}
	is := func(what string, chunk int, piece ledger.Bytes) bool {
		_, found := done[item{what, chunk, piece}]
		return found
	}
	var queues [3][]item // in, update, out
	for i := range chunks {
		queues[2] = append(queues[2], item{"gradients", i, 0})
	}
	for i := range chunks {
		queues[1] = append(queues[1], item{"update", i, 0})
		queues[2] = append(queues[2], item{"own", i, 0})
		for n := range ledger.Bytes(8) {
			queues[0] = append(queues[0], item{"in", i, n})
			queues[2] = append(queues[2], item{"out", i, n})
		}
	}
	amount := func(x item) float64 {
		c, step := chunks[x.chunk], slot/8
		switch x.what {
		case "gradients":
			return float64(c.Gradients)
		case "own":
			return float64(c.Own)
		case "update":
			return c.Update.Seconds()
		}
		return float64(min(c.In, (x.piece+1)*step) - min(c.In, x.piece*step))
	}
	free := func(x item) bool {
		switch x.what {
		case "in":
			return x.chunk < 2 || is("out", x.chunk-2, x.piece)
		case "update":
			return is("in", x.chunk, 7) && is("gradients", x.chunk, 0)
		case "own", "out":
			return is("update", x.chunk, 0)
		}
		return true
	}
	var progress [3]float64
	now := 0.0
	for len(queues[0])+len(queues[1])+len(queues[2]) > 0 {
		var active [3]bool
		for q := range queues {
			for len(queues[q]) > 0 && free(queues[q][0]) && progress[q] >= amount(queues[q][0])-1e-9 {
				done[queues[q][0]] = now
				queues[q], progress[q] = queues[q][1:], 0
			}
			active[q] = len(queues[q]) > 0 && free(queues[q][0])
		}
		speeds := [3]float64{0, 1, 0}
		speeds[0], speeds[2] = link.speeds(active[0], active[2])
		for q := range queues {
			if active[q] {
				progress[q] += speeds[q] * tick
			}
		}
		now += tick
	}
	last := len(chunks) - 1
	ready := done[item{"update", last, 0}]
	if chunks[last].Own > 0 {
		ready = done[item{"own", last, 0}]
	}
	return [3]float64{done[item{"update", last, 0}], ready, done[item{"out", last, 7}]}
}

// TestSpeeds: no direction is faster than alone, both together are no faster than the link.
func TestSpeeds(t *testing.T) {
	for _, test := range []struct {
		link    Link
		in, out float64
	}{
		{Link{411, 170, 0}, 411, 170},
		{Link{411, 170, 486}, 316, 170}, // the slow direction needs less than half
		{Link{50, 50, 60}, 30, 30},
		{Link{20, 50, 60}, 20, 40},
	} {
		if in, out := test.link.speeds(true, true); in != test.in || out != test.out {
			t.Errorf("%v: %g and %g, want %g and %g", test.link, in, out, test.in, test.out)
		}
	}
	eight := Link{In: 55, Out: 55}.shared(490, 8)
	if in, out := eight.speeds(true, true); in != 490.0/16 || out != 490.0/16 {
		t.Errorf("8 GPUs share 490: %g and %g each", in, out)
	}
}

// TestLimits compares the law with closed forms of the limits in picoseconds a parameter, at 10 bytes in each
// direction: a GH200 that moves 411 GB/s to the GPU and 170 back, and a box with 8 GPUs whose host memory is the limit.
func TestLimits(t *testing.T) {
	const n = 1 << 30
	sizes := make([]int64, 512)
	for i := range sizes {
		sizes[i] = n / 512
	}
	l := NewLayout(adamW(sizes...), Settings{ChunkBytes: DefaultChunk, Fraction: 1})
	for _, test := range []struct {
		name  string
		rates Rates
		ranks int
		want  float64 // picoseconds a parameter of the node
	}{
		{"GH200", Rates{Link: Link{In: 411e9, Out: 170e9}, Host: 486e9, Device: 3.4e12}, 1, 58.8},
		{"8 x H100", Rates{Link: Link{In: 55e9, Out: 55e9}, Host: 490e9, Device: 3.35e12}, 8, 40.8},
		{"one PCIe 5 GPU", Rates{Link: Link{In: 55e9, Out: 55e9}, Host: 490e9, Device: 3.35e12}, 1, 181.8},
	} {
		s := l.Step(test.rates, Job{Ranks: test.ranks})
		got := s.Exposed.Seconds() / float64(n*test.ranks) * 1e12
		if math.Abs(got/test.want-1) > 0.04 { // the first copy in and the last copy out
			t.Errorf("%s: %.1f ps a parameter, want %.1f", test.name, got, test.want)
		}
	}
}

// TestNewtonSchulz compares with the operations a parameter of published models' matrices.
func TestNewtonSchulz(t *testing.T) {
	if got := NewtonSchulz(1, 4096, 4096) / (4096 * 4096); got != 5*6*4096 {
		t.Errorf("a square matrix has %g operations a parameter", got)
	}
	if NewtonSchulz(3, 1024, 4096) != 3*NewtonSchulz(1, 4096, 1024) {
		t.Error("a tall matrix is transposed")
	}
}
