package simulate

import (
	"math"
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/forward"
	"plimsoll/internal/plan/job"
)

// smallLlama is the model of measurements with real torch.
const smallLlama = `{"model_type": "llama", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408,
	"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": false}`

// steady returns the peak and the end of the steady forward and backward pass, without workspaces of matrix products.
func steady(t *testing.T, j *job.Job) (figures []ledger.Bytes, host ledger.Bytes) {
	t.Helper()
	j.Kernels.GPU = forward.GPU{} // what kernels work in is not measured
	classes, err := Run(j, Limit{})
	if err != nil {
		t.Fatal(err)
	}
	for i, p := range classes[0].GPU.Phases {
		if p.Iteration != ledger.Steady || p.Name != ledger.Forward && p.Name != ledger.Backward {
			continue
		}
		workspaces := ledger.Bytes(0)
		for _, c := range p.Components {
			if c.Component == ledger.MatmulWorkspaces {
				workspaces = c.Bytes
			}
		}
		figures = append(figures, p.PeakRequested-workspaces, p.EndRequested-workspaces)
		for _, c := range classes[0].Host.Phases[i].End {
			if c.Component == ledger.OffloadedActivations && p.Name == ledger.Forward {
				host = c.Bytes
			}
		}
	}
	return figures, host
}

// trained returns the job of a training of smallLlama with real torch.
func trained(t *testing.T) *job.Job {
	t.Helper()
	j, err := (&job.Request{Model: filestest.InNewFolder(t)("config.json", smallLlama), Sequence: 256, MicroBatch: 2,
		Precision: "bf16", Torch: "2.15", Attention: "sdpa", GPU: "H100-80GB"}).Resolve()
	if err != nil {
		t.Fatal(err)
	}
	j.HoldsOutputs, j.HoldsCache = false, false
	return j
}

// within compares the peaks and ends of the steady passes with those of torch.
func within(t *testing.T, name string, got []ledger.Bytes, want [4]float64, share float64) {
	t.Helper()
	for i := range want {
		if off := float64(got[i])/want[i] - 1; math.Abs(off) > share {
			t.Errorf("%s: %d, in torch %.0f", name, got, want)
			return
		}
	}
}

// TestFakeQuantization compares trainings with modules of torchao (August 2026, commit 36027d82) for quantization-aware
// training, and one with norms and embeddings in fp32 under autocast, with real torch 2.15 and transformers 5.23 on
// tensors without memory. The plan leaves out zero points and counters of groups.
func TestFakeQuantization(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*job.Job)
		want   [4]float64
	}{
		"IntxFakeQuantizer": {func(j *job.Job) {
			j.QAT = &forward.FakeQuantization{Group: 64, Activations: true}
		}, [4]float64{239332708, 226221392, 242990416, 105820420}},
		"Int4WeightFakeQuantizer": {func(j *job.Job) {
			j.QAT = &forward.FakeQuantization{Group: 64, Activations: true, Learned: true}
		}, [4]float64{371350884, 358239568, 375008592, 104452356}},
		"MXFakeQuantizedLinear": {func(j *job.Job) { // of torchao 0.17
			j.QAT = &forward.FakeQuantization{Group: 32, Packed: true}
		}, [4]float64{182783820, 125115728, 184352080, 104362244}},
		"norms in fp32": {func(j *job.Job) {
			j.WidensNorms, j.AutocastType = true, dtype.BF16
		}, [4]float64{174973284, 161337680, 178106704, 137945348}},
	} {
		j := trained(t)
		test.change(j)
		got, _ := steady(t, j)
		within(t, name, got, test.want, 0.015)
	}
}

// TestStepsInBackward trains with an optimizer for each parameter: hardly any gradient is left at the end of the
// backward pass, whose first run makes all states.
func TestStepsInBackward(t *testing.T) {
	j := trained(t)
	j.StepsInBackward, j.Clip = true, 0
	classes, err := Run(j, Limit{})
	if err != nil {
		t.Fatal(err)
	}
	seen := false
	for _, p := range classes[0].GPU.Phases {
		if p.Name != ledger.Backward {
			continue
		}
		var states ledger.Bytes
		for _, c := range p.End {
			if c.Component == ledger.Gradients {
				t.Errorf("%s: %d of gradients are left", p.Iteration, c.Bytes)
			}
			if c.Component == ledger.OptimizerStates {
				states, seen = c.Bytes, true
			}
		}
		if want := ledger.Bytes(4 * j.Model.Elements()); states != want {
			t.Errorf("%s: states of %d, want %d", p.Iteration, states, want)
		}
	}
	if !seen {
		t.Error("no states")
	}
}

// TestQuantizedExperts quantizes the parameters of all experts, which products dequantize as a whole: from 8 bits to
// fp32 (int8_vectorwise_dequant of bitsandbytes), with a scale for each row.
func TestQuantizedExperts(t *testing.T) {
	file := filestest.InNewFolder(t)
	const gateUp, layers = 4 * 2 * 96 * 64, 2 // elements
	for text, want := range map[string]struct{ stored, dequantized int64 }{
		"adapter: qlora\nload_in_4bit: true\n": {gateUp/2 + gateUp/64 + 4*(gateUp/64/256),
			2 * gateUp * 3 / 2 * layers},
		"adapter: lora\nload_in_8bit: true\n": {gateUp + 4*(gateUp/64), 4 * gateUp * 3 / 2 * layers},
	} {
		q := job.Request{Model: file("config.json", smallMixtral), Configs: []string{file("train.yaml",
			"base_model: x\n"+text+"quantize_moe_experts: true\nlora_target_modules: [q_proj]\n"+
				"sequence_len: 64\nattn_implementation: flash_attention_2\n")}, GPU: "H100-80GB"}
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		_, list := makeParameters(j)
		quantized := 0
		for _, p := range list {
			if strings.HasSuffix(p.Name, "gate_up_proj") && p.Bytes() == want.stored {
				quantized++
			}
		}
		if quantized != layers {
			t.Errorf("%s: %d layers' experts are quantized", text, quantized)
		}
		classes, err := Run(j, Limit{})
		if err != nil {
			t.Fatal(err)
		}
		var most ledger.Bytes
		for _, p := range classes[0].GPU.Phases {
			for _, c := range p.Components {
				if c.Component == ledger.DequantizedWeights {
					most = max(most, c.Bytes)
				}
			}
		}
		if int64(most) != want.dequantized {
			t.Errorf("%s: %d bytes are dequantized, want %d", text, most, want.dequantized)
		}
	}
}

// TestOffloadedActivations compares the passes of a training whose activations wait on the host with real torch 2.15
// and transformers 5.23: the hooks of TRL's OffloadActivations, on tensors without memory.
func TestOffloadedActivations(t *testing.T) {
	for name, test := range map[string]struct {
		recompute bool
		offload   autograd.Offload
		want      [4]float64
		host      float64
	}{
		"plain": {false, autograd.Offload{Tracks: true},
			[4]float64{99784036, 78804304, 106983688, 104362244}, 67063808},
		"plain, with weights": {false, autograd.Offload{Tracks: true, Weights: true},
			[4]float64{99784036, 78804304, 106983688, 104362244}, 84758528},
		"plain, checkpoints": {true, autograd.Offload{Tracks: true},
			[4]float64{99851548, 78871816, 110739744, 104362244}, 20983808},
		"streams": {false, autograd.Offload{Streams: true, Stash: 5, Tracks: true},
			[4]float64{112446820, 99859792, 116100432, 104362244}, 44701696},
		"streams, with weights": {false, autograd.Offload{Streams: true, Stash: 5, Tracks: true, Weights: true},
			[4]float64{112446820, 99859792, 116100432, 104362244}, 62396416},
		"streams, checkpoints": {true, autograd.Offload{Streams: true, Stash: 5, Tracks: true},
			[4]float64{101426460, 88839432, 111264032, 104362244}, 11544576},
	} {
		j := trained(t)
		if test.recompute {
			j.Recompute = &autograd.Checkpoint{}
		}
		j.OffloadActivations = &test.offload
		got, host := steady(t, j)
		within(t, name, got, test.want, 0.02)
		if math.Abs(float64(host)/test.host-1) > 0.01 {
			t.Errorf("%s: %d on the host, in torch %.0f", name, host, test.host)
		}
	}
}
