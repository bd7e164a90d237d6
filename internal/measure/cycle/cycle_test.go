//go:build linux

package cycle

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"plimsoll/internal/base/activity"
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/rehearse"
	"plimsoll/internal/plan/roads"
	"plimsoll/internal/state/shard"
	"plimsoll/internal/state/states"
)

// silent shows no progress.
type silent struct{}

func (silent) Begin(string, int64, activity.Unit) {}
func (silent) Advance(int64)                      {}
func (silent) End()                               {}

// blocks returns a model of an embedding and blocks with a matrix, a stack of matrices and a vector.
func blocks(count int, width int64) *model.Model {
	m := &model.Model{Name: "blocks", Architecture: "Test"}
	add := func(name string, block int, shape ...int64) {
		m.Parameters = append(m.Parameters, model.Parameter{Name: name, Shape: shape, DType: dtype.BF16, Block: block})
	}
	add("embed_tokens.weight", -1, 100, width)
	for i := range count {
		prefix := "layers." + string(rune('a'+i))
		add(prefix+".up.weight", i, 4*width, width)
		add(prefix+".norm.weight", i, width)
	}
	add("lm_head.weight", -1, 100, width)
	m.Parameters[len(m.Parameters)-1].TiedTo = "embed_tokens.weight"
	return m
}

// placed returns the placement of a request for a model on this host.
func placed(t testing.TB, r Request, m *model.Model) *Placement {
	t.Helper()
	r.Model = "gpt2"
	r.Ranks = max(1, r.Ranks)
	r.Steps = max(1, r.Steps)
	j, err := r.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	j.Model = m
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	p, err := NewPlacement(j, h)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestBytesArrive: after steps in either direction, every byte is where the layout says, and measured bytes are the
// planned ones.
func TestBytesArrive(t *testing.T) {
	for name, r := range map[string]Request{
		"chunked":         {},
		"small chunks":    {ChunkBytes: 100 * ledger.KiB},
		"whole":           {Mode: Whole},
		"no recovery":     {NoRecovery: true},
		"fp32 masters":    {Request: rehearse.Request{State: "fp32"}},
		"fp32 parameters": {Request: rehearse.Request{Precision: "fp32"}},
		"bf16 moments":    {Request: rehearse.Request{Moments: "bf16"}},
		"two ranks":       {Request: rehearse.Request{Ranks: 2, WorldSize: 3}},
		"Muon":            {Request: rehearse.Request{Optimizer: Muon}},
		"Muon, whole":     {Request: rehearse.Request{Optimizer: Muon}, Mode: Whole, NoRecovery: true},
		"SGD":             {Request: rehearse.Request{Optimizer: "sgd"}, ChunkBytes: 1},
	} {
		t.Run(name, func(t *testing.T) {
			r.Steps = 3
			p := placed(t, r, blocks(6, 256))
			m, err := p.Run(t.Context(), silent{})
			if err != nil {
				t.Fatal(err)
			}
			planned, measured := rehearse.Needed(p.Planned[:len(p.Ranks)]), rehearse.Needed(m.Measured[:len(p.Ranks)])
			if off := measured - planned; 1000*max(off, -off) > 5*planned {
				t.Errorf("%v measured, %v planned", measured, planned)
			}
			if len(m.Steps) != r.Steps {
				t.Errorf("%d steps, want %d", len(m.Steps), r.Steps)
			}
			checkTimeline(t, p, m.Timeline)
		})
	}
}

// checkTimeline: each actor has every chunk, and no two at a time.
func checkTimeline(t *testing.T, p *Placement, line *rehearse.Timeline) {
	t.Helper()
	if want := 1 + 3*len(p.Ranks); len(line.Tracks) != want {
		t.Fatalf("%d tracks, want %d", len(line.Tracks), want)
	}
	for i, track := range line.Tracks[1:] {
		want := len(p.Ranks[i/3].Layout.Chunks)
		switch {
		case i%3 == 1 && p.Settings.Whole:
			want = 1
		case i%3 == 2 && p.Ranks[i/3].Layout.Gradients() > 0:
			want++ // the gradients
		}
		if len(track.Spans) != want {
			t.Errorf("%s has %d spans, want %d", track.Name, len(track.Spans), want)
		}
		for j, s := range track.Spans {
			if s.From > s.To || j > 0 && s.From < track.Spans[j-1].To {
				t.Errorf("%s: %v begins before %v ends", track.Name, s, track.Spans[max(j-1, 0)])
			}
		}
	}
}

// TestFaults: a piece that is left out, copied twice or copied from elsewhere ends the rehearsal.
func TestFaults(t *testing.T) {
	type mover = func(l *link, to, from []byte)
	for name, broken := range map[string]struct {
		move mover
		want string
	}{
		"left out": {func(l *link, _, from []byte) { l.moved.Add(int64(len(from))) }, "a piece was left out"},
		"twice": {func(l *link, to, from []byte) {
			l.copy(to, from)
			l.copy(to, from)
		}, "were copied to the window"},
		"elsewhere": {func(l *link, to, from []byte) {
			l.copy(to[stampEvery:], from[:len(from)-stampEvery])
			l.copy(to[:stampEvery], from[len(from)-stampEvery:])
		}, "copied to another place"},
		"a word": {func(l *link, to, from []byte) {
			l.copy(to, from)
			to[stampEvery+8]++
		}, "copied to another place"},
	} {
		for _, mode := range Modes() {
			for direction, of := range map[string]func(*pipeline) *link{
				"in": func(p *pipeline) *link { return p.in }, "out": func(p *pipeline) *link { return p.out },
			} {
				t.Run(strings.Join([]string{name, mode, direction}, ", "), func(t *testing.T) {
					p := placed(t, Request{Mode: mode, ChunkBytes: 4 * ledger.MiB}, blocks(6, 512))
					err := runWith(t, p, 3, func(pipe *pipeline) {
						l, calls := of(pipe), new(atomic.Int64)
						l.move = func(to, from []byte) {
							if pipe.steps == 2 && len(from) > 2*stampEvery && calls.Add(1) == 5 {
								broken.move(l, to, from)
								return
							}
							l.copy(to, from)
						}
					})
					if err == nil || !strings.Contains(err.Error(), broken.want) {
						t.Errorf("got %v, want %q", err, broken.want)
					}
				})
			}
		}
	}
}

// TestRegionsMove: a step writes every region a gap lower than it was, or higher, so that no region overwrites itself.
func TestRegionsMove(t *testing.T) {
	p := placed(t, Request{ChunkBytes: ledger.MiB}, blocks(4, 256))
	places := states.NewLayout(p.Ranks[0].Description.Chunks)
	for _, steps := range []int64{1, 2, 3} {
		var rank *pipeline
		err := runWith(t, p, int(steps), func(pipe *pipeline) { rank = pipe }, func() {
			for number, c := range rank.layout.Chunks {
				at := places.Offset(number, steps)
				if err := statesOf(number).checkAll(rank.states[at:at+int64(c.State)], steps); err != nil {
					t.Errorf("after %d steps, chunk %d: %v", steps, number, err)
				}
			}
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// runWith makes steps whose first pipeline was changed, and looks at what they have left.
func runWith(t *testing.T, p *Placement, steps int, change func(*pipeline), after ...func()) error {
	tr, err := p.begin()
	defer func() {
		if err := tr.close(); err != nil {
			t.Error(err)
		}
	}()
	if err != nil {
		t.Fatal(err)
	}
	tr.fill(t.Context(), silent{})
	change(tr.ranks[0])
	for range steps {
		if _, err := tr.step(); err != nil {
			return err
		}
	}
	for _, look := range after {
		look()
	}
	return tr.checkAll()
}

// TestPace: on links that are slower than this host copies, no step takes less time than the law says. Without -short,
// the fastest of ten runs takes as long: other work on this host makes a run slower, never faster.
func TestPace(t *testing.T) {
	for name, r := range map[string]Request{
		"copies out are slowest": {LinkIn: 0.4, LinkOut: 0.2, UpdateMilliseconds: 20},
		"copies in are slowest":  {LinkIn: 0.1, LinkOut: 0.4, UpdateMilliseconds: 20, NoRecovery: true},
		"the update is slowest":  {LinkIn: 0.4, LinkOut: 0.4, UpdateMilliseconds: 200},
		"whole":                  {LinkIn: 0.2, LinkOut: 0.2, UpdateMilliseconds: 20, Mode: Whole},
	} {
		t.Run(name, func(t *testing.T) {
			r.Steps, r.ChunkBytes = 3, 2*ledger.MiB
			r.Pace.ForwardMilliseconds, r.Pace.BackwardMilliseconds = 5, 10
			p := placed(t, r, blocks(8, 256))
			road, err := p.States(p.Mode(), p.Link)
			if err != nil {
				t.Fatal(err)
			}
			for range 10 {
				m, err := p.Run(t.Context(), silent{})
				if err != nil {
					t.Fatal(err)
				}
				if slow := comparePace(t, Median(m.Steps), road.Step); slow == "" || testing.Short() {
					return
				} else {
					t.Log(slow)
				}
			}
			t.Error("the law is off in 10 runs")
		})
	}
}

// comparePace compares a step with the law. It says where the step took longer.
func comparePace(t *testing.T, step Step, law *roads.Step) (slow string) {
	t.Helper()
	for _, c := range []struct {
		what string
		got  float64
		want time.Duration
	}{
		{"exposed", step.ExposedSeconds, law.Exposed}, {"copy in", step.InSeconds, law.In},
		{"update", step.UpdateSeconds, law.Update}, {"copy out", step.OutSeconds, law.Out},
	} {
		switch want := c.want.Seconds(); {
		case c.got < 0.98*want:
			t.Fatalf("%s: %.4g s, less than the %.4g s of the law", c.what, c.got, want)
		case c.got > 1.1*want+0.005:
			slow += fmt.Sprintf("%s: %.4g s, the law says %.4g s; ", c.what, c.got, want)
		}
	}
	return slow
}

// TestBytesAParameter compares what a parameter takes with what the formats say, in tensors without alignment.
func TestBytesAParameter(t *testing.T) {
	for _, test := range []struct {
		request Request
		want    float64
	}{
		{Request{}, 14},
		{Request{NoRecovery: true}, 10},
		{Request{Request: rehearse.Request{State: "fp32"}}, 16},
		{Request{Request: rehearse.Request{Moments: "bf16"}}, 10},
		{Request{Request: rehearse.Request{GradientType: "fp32"}}, 16},
		{Request{Request: rehearse.Request{Optimizer: Muon}}, 10},
		{Request{Request: rehearse.Request{Optimizer: Muon, Moments: "bf16"}}, 8},
		{Request{Request: rehearse.Request{Optimizer: Muon}, NoRecovery: true}, 6},
		{Request{Request: rehearse.Request{Optimizer: Muon, Moments: "bf16"}, NoRecovery: true}, 4},
	} {
		m := blocks(3, 512)
		m.Parameters = slices.DeleteFunc(m.Parameters, func(p model.Parameter) bool { return !isMatrix(p, "lm_head") })
		p := placed(t, test.request, m)
		bytes := p.HostBytes() - p.Ranks[0].Layout.Gap() - ledger.Bytes(p.Ranks[0].Description.ControlBytes())
		if got := float64(bytes) / float64(p.Parameters); got != test.want {
			t.Errorf("%+v: %g bytes a parameter, want %g", test.request, got, test.want)
		}
	}
}

// TestLayoutsAgree: the description that the optimizer service gets has the sizes of the law's layout, and every rank
// has parameters of its own.
func TestLayoutsAgree(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		request := Request{ChunkBytes: ledger.Bytes(rapid.Int64Range(1, 1<<24).Draw(r, "chunk")),
			NoRecovery: rapid.Bool().Draw(r, "no recovery")}
		request.Ranks = rapid.IntRange(1, 3).Draw(r, "ranks")
		request.WorldSize = request.Ranks
		m := blocks(rapid.IntRange(0, 5).Draw(r, "blocks"), rapid.Int64Range(1, 99).Draw(r, "width"))
		p := placed(t, request, m)
		elements := int64(0)
		for _, rank := range p.Ranks {
			if err := rank.Description.Validate(); err != nil {
				t.Fatal(err)
			}
			places := states.NewLayout(rank.Description.Chunks)
			if places.Bytes() != int64(rank.Layout.Arena()) {
				t.Fatalf("%d bytes, the law's layout has %d", places.Bytes(), rank.Layout.Arena())
			}
			for i, c := range rank.Description.Chunks {
				if c.Bytes != int64(rank.Layout.Chunks[i].Region()) {
					t.Fatalf("chunk %d: %d bytes, the law's layout has %d", i, c.Bytes, rank.Layout.Chunks[i].Region())
				}
				for _, tensor := range c.Tensors {
					if tensor.Key == string(ledger.ExpAvg) {
						elements += tensor.Shape[0]
					}
				}
			}
		}
		if elements != p.Model.Elements() {
			t.Fatalf("%d of %d elements have a state", elements, p.Model.Elements())
		}
	})
}

// TestRequests lists rehearsals that are refused.
func TestRequests(t *testing.T) {
	for _, test := range []struct {
		want    string
		request Request
	}{
		{`--offload-mode is "half"`, Request{Mode: "half"}},
		{"--link-in is -1", Request{LinkIn: -1}},
		{"--link-out is NaN", Request{LinkOut: math.NaN()}},
		{"--update-ms is -1", Request{UpdateMilliseconds: -1}},
		{"--overlap and --offload states are both given", Request{Request: rehearse.Request{
			Pace: rehearse.PaceRequest{Mode: "forward", ForwardMilliseconds: 1}}}},
		{"--topk-ratio", Request{Request: rehearse.Request{Pace: rehearse.PaceRequest{TopKRatio: new(float64)}}}},
		{"--layers", Request{Request: rehearse.Request{Pace: rehearse.PaceRequest{Layers: 3}}}},
		{"--forward-ms is 0", Request{Request: rehearse.Request{Pace: rehearse.PaceRequest{BackwardMilliseconds: 3}}}},
		{"--moments int8", Request{Request: rehearse.Request{Moments: "int8"}}},
		{"--state split24", Request{Request: rehearse.Request{State: "split24"}}},
		{"gradients are fp16", Request{Request: rehearse.Request{Precision: "fp16"}}},
		{"--world-size is 2", Request{Request: rehearse.Request{Optimizer: Muon, WorldSize: 2}}},
		{`--optimizer is "munon"`, Request{Request: rehearse.Request{Optimizer: "munon"}}},
	} {
		test.request.Model, test.request.Ranks = "gpt2", 1
		var input *fault.Input
		if _, err := test.request.Resolve(); !errors.As(err, &input) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%q: got %v", test.want, err)
		}
	}
}

// TestEmptyRanks: a rank without any row is refused.
func TestEmptyRanks(t *testing.T) {
	p := placed(t, Request{}, blocks(1, 8))
	p.WorldSize, p.Job.Ranks = 101, 101
	if _, err := NewPlacement(p.Job, p.Host); err == nil || !strings.Contains(err.Error(), "rank 100 of 101 has no") {
		t.Error(err)
	}
}

// TestVerdict: a host that is too small gets advice, and nothing is mapped.
func TestVerdict(t *testing.T) {
	p := placed(t, Request{Mode: Whole}, blocks(6, 1024))
	small := *p.Host
	p.Host = &small
	needed := rehearse.Needed(p.Planned)
	for _, test := range []struct {
		available ledger.Bytes
		advice    []string
	}{
		{needed, nil},
		{needed - 1, []string{"--offload-mode chunked: ", "--no-recovery: ", "--moments bf16: ", "--world-size 2: "}},
		{ledger.MiB, nil},
	} {
		small.Memory = host.Memory{Total: test.available, Available: test.available}
		v := p.Verdict()
		if v.Fits != (test.available >= needed) || v.Needed != needed {
			t.Errorf("%v of %v: %+v", test.available, needed, v)
		}
		for i, advice := range test.advice {
			if len(v.WouldFit) != len(test.advice) || !strings.HasPrefix(v.WouldFit[i], advice) {
				t.Errorf("%v: %q, want %q", test.available, v.WouldFit, test.advice)
				break
			}
		}
	}
	small.Memory = host.Memory{Total: needed, Available: needed}
	small.FileSize = ledger.KiB
	if v := p.Verdict(); v.Fits || !strings.Contains(v.Shortage, "RLIMIT_FSIZE") {
		t.Errorf("files of a KiB: %+v", v)
	}
}

// TestMedian: the first step does not count, and either order of the chunks counts for half.
func TestMedian(t *testing.T) {
	steps := func(seconds ...float64) (list []Step) {
		for _, s := range seconds {
			list = append(list, Step{Seconds: s, OutSeconds: 2 * s})
		}
		return list
	}
	for _, test := range []struct {
		steps []Step
		want  float64
	}{
		{steps(7), 7}, {steps(7, 1), 1}, {steps(7, 1, 3), 2}, {steps(7, 1, 3, 2, 90, 9, 4), 3},
	} {
		if got := Median(test.steps); got.Seconds != test.want || got.OutSeconds != 2*test.want {
			t.Errorf("%v: %+v, want %g seconds", test.steps, got, test.want)
		}
	}
}

// TestRows: ranks have what torch.chunk gives them, and all of it together.
func TestRows(t *testing.T) {
	for _, test := range []struct {
		shape []int64
		ranks int
		want  []shard.Range
	}{
		{[]int64{5, 3}, 2, []shard.Range{{First: 0, Count: 9}, {First: 9, Count: 6}}},
		{[]int64{4}, 3, []shard.Range{{First: 0, Count: 2}, {First: 2, Count: 2}, {First: 4, Count: 0}}},
		{[]int64{2, 2, 2}, 1, []shard.Range{{First: 0, Count: 8}}},
		{nil, 2, []shard.Range{{First: 0, Count: 1}, {First: 1, Count: 0}}},
	} {
		for rank, want := range test.want {
			if got := rows(test.shape, rank, test.ranks); got != want {
				t.Errorf("%v, rank %d of %d: %v, want %v", test.shape, rank, test.ranks, got, want)
			}
		}
	}
}
