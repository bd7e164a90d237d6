//go:build linux

package rehearse

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/activity"
	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/machine/probe"
	"plimsoll/internal/state/optim/kernel"
)

// silent ignores progress.
type silent struct{}

func (silent) Begin(string, int64, activity.Unit) {}
func (silent) Advance(int64)                      {}
func (silent) End()                               {}

// small returns a model of a few parameters more than one norm block.
func small(elements int64) *model.Model {
	return &model.Model{Name: "small", Architecture: "Test",
		Parameters: []model.Parameter{{Name: "w", Shape: []int64{elements}, DType: dtype.BF16, Block: -1}}}
}

// mixed returns a model of tensors that int8 moments treat differently.
func mixed() *model.Model {
	m := &model.Model{Name: "mixed", Architecture: "Test"}
	for _, p := range []model.Parameter{
		{Name: "embed_tokens.weight", Shape: []int64{300, 77}},
		{Name: "layers.0.norm.weight", Shape: []int64{77}},
		{Name: "layers.0.up.weight", Shape: []int64{1000, 77}},
		{Name: "layers.0.up.bias", Shape: []int64{4095}},
		{Name: "layers.0.down.weight", Shape: []int64{77, 1000}},
		{Name: "lm_head.weight", Shape: []int64{300, 77}, TiedTo: "embed_tokens.weight"},
	} {
		p.DType = dtype.BF16
		m.Parameters = append(m.Parameters, p)
	}
	return m
}

// TestSectionsFollowTheTensors counts the parameters of each type of moments on all ranks. A rank may hold a part of
// a tensor, with the same type of moments as the full tensor.
func TestSectionsFollowTheTensors(t *testing.T) {
	const embedded, small, large = 300 * 77, 77 + 4095, 2 * 77 * 1000
	for _, test := range []struct {
		request Request
		fp32    int64
	}{
		{Request{Moments: "int8"}, embedded + small},
		{Request{Moments: "int8", EmbeddingMoments: "int8"}, small},
		{Request{Moments: "int8", EmbeddingMoments: "fp32", State: "fp32", GradientType: "fp32"}, embedded + small},
	} {
		for _, ranks := range []int{1, 2, 7} {
			test.request.Ranks = ranks
			j := resolve(t, test.request)
			j.Model = mixed()
			p, err := NewPlacement(j, hostWith(t, ledger.GiB))
			if err != nil {
				t.Fatal(err)
			}
			held := p.ParametersByMoments()
			if len(held) != 2 || held[kernel.MomentsFP32] != test.fp32 ||
				held[kernel.MomentsInt8] != p.Held-test.fp32 || p.Parameters != embedded+small+large {
				t.Errorf("%+v: %v of %d", test.request, held, p.Held)
			}
			for i, shard := range p.Shards {
				if n := len(shard.Sections()); ranks == 1 && n != 4 && n != 5 || n > 5 || n == 0 {
					t.Errorf("rank %d of %d has sections %v", i, ranks, shard.Sections())
				}
			}
			// The format's bytes, plus 6 bytes for each parameter with fp32 moments. Each block has a header, and
			// each section may have a short block.
			more := int64(p.StateBytes()) - j.Format.ResidentBytes(p.Held) - 6*test.fp32
			if more > 0 || more < -2*(test.fp32/kernel.Block+1) {
				t.Errorf("%+v: %d bytes, %d more than expected", test.request, p.StateBytes(), more)
			}
		}
	}
}

// TestMomentsThatDoNotSuit expects a refusal before anything is planned.
func TestMomentsThatDoNotSuit(t *testing.T) {
	lion := filepath.Join(t.TempDir(), "lion.json")
	text := `{"train_batch_size": 1, "bf16": {"enabled": true}, "optimizer": {"type": "Lion", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}`
	if err := os.WriteFile(lion, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for want, request := range map[string]Request{
		"the optimizer is Lion":           {DeepSpeed: lion, Moments: "int8"},
		"--moments is \"int4\"":           {Moments: "int4"},
		"--embedding-moments is \"bf16\"": {Moments: "int8", EmbeddingMoments: "bf16"},
		"--embedding-moments is for":      {Moments: "bf16", EmbeddingMoments: "fp32"},
	} {
		request.Model, request.Ranks = "gpt2", 1
		if _, err := request.Resolve(); !errors.As(err, new(*fault.Input)) || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: got %v", request, err)
		}
	}
}

// TestHyperparametersThatBinary32CannotHold expects a refusal before anything is planned.
func TestHyperparametersThatBinary32CannotHold(t *testing.T) {
	for params, want := range map[string]string{
		`{"lr": 1e39}`:            "the learning rate",
		`{"weight_decay": 1e308}`: "the weight decay",
		`{"eps": 1e-60}`:          "the epsilon",
		`{"lr": 1e30, "weight_decay": 1e30, "eps": 1.0}`: "the weight decay",
	} {
		path := filepath.Join(t.TempDir(), "recipe.json")
		text := `{"train_batch_size": 1, "bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": ` +
			params + `}, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}`
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Request{Model: "gpt2", Ranks: 1, DeepSpeed: path}.Resolve()
		if !errors.As(err, new(*fault.Input)) || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), "binary32") {
			t.Errorf("%s: got %v", params, err)
		}
	}
}

// hostWith returns this host with a given amount of available memory.
func hostWith(t *testing.T, available ledger.Bytes) *host.Host {
	h, err := host.Local()
	if err != nil {
		t.Fatal(err)
	}
	h.Memory = host.Memory{Total: 2 * available, Available: available}
	h.HugePages.Pools = nil
	return h
}

func resolve(t *testing.T, r Request) *Job {
	if r.Model == "" {
		r.Model = "gpt2"
	}
	j, err := r.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func TestPlannedBytes(t *testing.T) {
	for _, test := range []struct {
		state, gradient, moments, embeddings string
		want                                 float64
	}{
		{"", "", "", "", 14}, {"split", "fp32", "", "", 16}, {"fp32", "fp32", "", "", 18}, {"fp32", "bf16", "", "", 16},
		// 0.014 % of the parameters are in small tensors, 27.6 % in embeddings.
		{"", "", "int8", "int8", 8.0087}, {"", "", "int8", "", 9.6599},
	} {
		for _, ranks := range []int{1, 2, 3} {
			j := resolve(t, Request{Model: "qwen2.5-0.5b", Ranks: ranks, State: test.state,
				GradientType: test.gradient, Moments: test.moments, EmbeddingMoments: test.embeddings})
			p, err := NewPlacement(j, hostWith(t, 64*ledger.GiB))
			if err != nil {
				t.Fatal(err)
			}
			if got := float64(p.StateBytes()) / float64(p.Parameters); math.Abs(got-test.want) > 1e-4 {
				t.Errorf("state %q, gradients %q, %d ranks: %v bytes a parameter, want %v", test.state, test.gradient,
					ranks, got, test.want)
			}
			if p.Parameters != 494_032_768 {
				t.Errorf("%d ranks hold %d parameters", ranks, p.Parameters)
			}
		}
	}
}

// TestWhatDoesNotFitSaysWhatWould checks each suggestion by planning it.
func TestWhatDoesNotFitSaysWhatWould(t *testing.T) {
	h := hostWith(t, 100*ledger.GiB)
	p, err := NewPlacement(resolve(t, Request{Model: "llama-3-8b", Ranks: 2, State: "fp32", GradientType: "fp32"}), h)
	if err != nil {
		t.Fatal(err)
	}
	v := p.Verdict()
	if v.Fits || v.Missing != v.Needed-v.Available || v.LimitedBy != "MemAvailable" || len(v.WouldFit) != 3 {
		t.Fatalf("%+v", v)
	}
	for _, change := range v.WouldFit {
		request := Request{Model: "llama-3-8b", Ranks: 2, State: "fp32", GradientType: "fp32"}
		less := request
		var n int
		var name string
		switch flag, rest, _ := strings.Cut(change, " "); flag {
		case "--world-size":
			fmt.Sscan(rest, &n)
			request.WorldSize, less.WorldSize = n, n-2
		case "--state":
			if !strings.HasPrefix(change, "--state split --grad-dtype bf16 --moments bf16: 10 "+
				"bytes a parameter instead of 18") {
				t.Fatalf("unexpected suggestion %q", change)
			}
			request.State, request.GradientType, request.Moments = "split", "bf16", "bf16"
		case "--model":
			fmt.Sscan(rest, &name)
			request.Model = strings.TrimSuffix(name, ":")
		default:
			t.Fatalf("unexpected suggestion %q", change)
		}
		changed, err := NewPlacement(resolve(t, request), h)
		if err != nil || !changed.Verdict().Fits {
			t.Errorf("%q was suggested and does not fit: %v", change, err)
		}
		if less.WorldSize > 0 {
			changed, err := NewPlacement(resolve(t, less), h)
			if err != nil || changed.Verdict().Fits {
				t.Errorf("%q was suggested, and 2 ranks fewer would do: %v", change, err)
			}
		}
	}

	// With a little more memory the smaller format is enough.
	h = hostWith(t, 110*ledger.GiB)
	p.Host = h
	if v := p.Verdict(); v.Fits || !strings.HasPrefix(v.WouldFit[0], "--state split --grad-dtype bf16:") {
		t.Errorf("%+v", v)
	}
	// With less, only the smallest format is.
	h = hostWith(t, 66*ledger.GiB)
	p.Host = h
	if v := p.Verdict(); v.Fits || !strings.HasPrefix(v.WouldFit[0],
		"--state split --grad-dtype bf16 --moments int8: 8.4 bytes") {
		t.Errorf("%+v", v)
	}
}

func TestLimitsOfCgroupsCount(t *testing.T) {
	h := hostWith(t, 100*ledger.GiB)
	h.Memory.Limits = []host.Limit{{Name: "cgroup /job memory.max", Limit: 2 * ledger.GiB, Used: ledger.GiB}}
	p, err := NewPlacement(resolve(t, Request{Ranks: 1}), h)
	if err != nil {
		t.Fatal(err)
	}
	if v := p.Verdict(); v.Fits || v.Available != ledger.GiB || v.LimitedBy != "cgroup /job memory.max" {
		t.Errorf("%+v", v)
	}
}

// TestMeasuredIsPlanned runs a real rehearsal, which must leave nothing behind.
func TestMeasuredIsPlanned(t *testing.T) {
	for _, request := range []Request{
		{Ranks: 1, Steps: 3},
		{Ranks: 2, Steps: 3, State: "fp32", GradientType: "fp32"},
		{Ranks: 2, WorldSize: 5, Steps: 1, GradientType: "fp16",
			LossScaling: LossScaling{InitialScalePower: pointer(14)}},
		{Ranks: 1, Steps: 3, Moments: "int8"},
		{Ranks: 2, WorldSize: 3, Steps: 2, Moments: "int8", EmbeddingMoments: "int8", State: "fp32"},
	} {
		j := resolve(t, request)
		j.Model = small(1_000_003)
		if request.Moments != "" {
			j.Model = mixed()
		}
		p, err := NewPlacement(j, hostWith(t, ledger.GiB))
		if err != nil {
			t.Fatal(err)
		}
		m, err := p.Run(context.Background(), silent{})
		if err != nil {
			t.Fatal(err)
		}
		if len(m.Steps) != request.Steps || len(m.Measured) != len(p.Planned) {
			t.Fatalf("%d steps, %d devices", len(m.Steps), len(m.Measured))
		}
		for _, e := range ledger.Compare(p.Planned, m.Measured) {
			if e.Measured == nil {
				t.Fatalf("%s of rank %d was not measured", e.Component, e.Rank)
			}
			if exact := e.Component != ledger.PageTables && e.Component != ledger.Process; exact &&
				*e.Measured != e.Planned {
				t.Errorf("%s of rank %d: %d bytes planned, %d measured", e.Component, e.Rank, e.Planned, *e.Measured)
			}
		}
		for i, s := range m.Steps {
			if s.Skipped || !(s.GradientNorm > 0) || s.Seconds < s.NormSeconds+s.UpdateSeconds ||
				s.TrafficSeconds <= 0 {
				t.Errorf("step %d: %+v", i, s)
			}
		}
		memory, err := probe.Process(os.DirFS("/"), "self")
		if err != nil {
			t.Fatal(err)
		}
		for name := range memory.Mappings {
			if strings.HasPrefix(name, arenaPrefix) {
				t.Errorf("%s is still mapped", name)
			}
		}
	}
}

func TestInterruptedRehearsalEnds(t *testing.T) {
	ctx, cancel := context.WithCancelCause(context.Background())
	stop := errors.New("stop")
	cancel(stop)
	j := resolve(t, Request{Ranks: 1, Steps: 3})
	j.Model = small(1000)
	p, err := NewPlacement(j, hostWith(t, ledger.GiB))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Run(ctx, silent{}); !errors.Is(err, stop) {
		t.Errorf("got %v", err)
	}
}

// TestModelWithoutParameters reads a file whose tensors have no elements: that is bad input, not a fault of the
// program.
func TestModelWithoutParameters(t *testing.T) {
	header := `{"a": {"dtype": "F32", "shape": [0, 8], "data_offsets": [0, 0]}}`
	file := filepath.Join(t.TempDir(), "model.safetensors")
	content := append([]byte{byte(len(header)), 0, 0, 0, 0, 0, 0, 0}, header...)
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Request{Model: file, Ranks: 1}.Resolve()
	var input *fault.Input
	if !errors.As(err, &input) || !strings.Contains(err.Error(), file+": the model has no parameters") {
		t.Errorf("the error is %v", err)
	}
}
