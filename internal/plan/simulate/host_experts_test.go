package simulate

import (
	"fmt"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

const hostedText = "model_name_or_path: Qwen/Qwen3-30B-A3B\nfinetuning_type: lora\ncutoff_len: 2048\nbf16: true\n" +
	"use_kt: true\nper_device_train_batch_size: 1\n"

// hosted simulates a training with KTransformers on so many GPUs, under FSDP2 if there are several.
func hosted(t *testing.T, text string, gpus int) (RankClass, error) {
	t.Helper()
	q := job.Request{Configs: []string{filestest.InNewFolder(t)("train.yaml", text)}, GPUs: gpus, GPU: "H100-80GB"}
	if gpus > 1 {
		q.FSDP = "2"
	}
	j, err := q.Resolve()
	if err != nil {
		return RankClass{}, err
	}
	classes, err := Run(j, Limit{})
	if err != nil {
		t.Fatal(err)
	}
	return classes[0], nil
}

// heldOnNode returns the sizes of components at the peak of a phase, of all ranks of a node.
func heldOnNode(c RankClass, name ledger.PhaseName, iteration ledger.Iteration) map[ledger.Component]int64 {
	sizes := map[ledger.Component]int64{}
	for _, p := range c.Host.Phases {
		if p.Name == name && p.Iteration == iteration {
			for _, h := range p.Components {
				sizes[h.Component] = int64(h.Bytes) * int64(c.RanksPerNode)
			}
		}
	}
	return sizes
}

// TestHostExperts weighs what KTransformers has on the host, by the shapes of the tensors in kt_kernel/sft. The model
// has 48 layers of 128 experts of width 768, of which a token takes 8, and a hidden size of 2048.
func TestHostExperts(t *testing.T) {
	const (
		experts  = 48 * 128 * 3 * 768 * 2048
		adapters = 48 * 128 * 8 * 3 * (2048 + 768)
		retained = "kt_cpu_activation: retain\n"
		pools    = "kt_config: {kt_tp_enabled: true, kt_threadpool_count: 2}\n"
	)
	for name, c := range map[string]struct {
		text string
		gpus int
		want map[ledger.Component]int64
	}{
		"one pool, one layer at a time": {hostedText, 1, map[ledger.Component]int64{
			ledger.Parameters: 2 * (experts + adapters), ledger.Gradients: 2 * adapters,
			ledger.OptimizerStates: 4 * adapters, ledger.TransposedWeights: 2 * experts / 48,
			ledger.ExpertActivations: 2048*2048*2 + 2048*8*(3*768*2+8*4+2048*2)}},
		"two pools": {hostedText + retained + pools, 1, map[ledger.Component]int64{
			ledger.Parameters: 58_812_530_688, ledger.Gradients: 830_472_192, ledger.OptimizerStates: 1_660_944_384,
			ledger.TransposedWeights: 1_207_959_552, ledger.AdapterCopies: 12_255_756_288,
			ledger.ExpertActivations: 11_324_620_800, ledger.ExpertBuffers: 3_010_330_624}},
		"two ranks": {hostedText + retained, 2, map[ledger.Component]int64{
			ledger.Parameters: 2 * (experts + adapters), ledger.OptimizerStates: 4 * adapters,
			ledger.ExpertActivations: 48 * 4096 * (2048*2 + 8*(3*768*2+8*4+2048*2) + 2048*2)}},
		"int8": {hostedText + "kt_weight_path: w\nkt_config: {kt_expert_weight_format: int8}\n", 1,
			map[ledger.Component]int64{
				ledger.Parameters:        experts + 48*128*4*(768+768+2048) + 2*adapters,
				ledger.TransposedWeights: experts/48 + 128*4*(2048+2048+768)}},
		"fp8": {hostedText + "kt_config: {kt_expert_weight_format: fp8}\n", 1, map[ledger.Component]int64{
			ledger.Parameters: experts + experts/128/128*4 + 2*adapters}},
		"all transposed": {hostedText + "kt_config: {kt_share_backward_bb: false}\n", 1, map[ledger.Component]int64{
			ledger.TransposedWeights: 2 * experts}},
	} {
		t.Run(name, func(t *testing.T) {
			class, err := hosted(t, c.text, c.gpus)
			if err != nil {
				t.Fatal(err)
			}
			sizes := heldOnNode(class, ledger.Backward, ledger.Steady)
			for component, want := range c.want {
				if got := sizes[component]; got < want || got > want+want/100_000 { // parts of ranks are rounded up
					t.Errorf("%s takes %d bytes, want %d", component, got, want)
				}
			}
			if class.Trained < adapters {
				t.Errorf("%d parameters are trained, and %d of the adapters of experts", class.Trained, int64(adapters))
			}
		})
	}
}

// TestExpertKernels compares buffers with the sizes that kt-kernel computes: the lines of init_all_buffers,
// alloc_forward_buffers and alloc_backward_buffers in sft_moe.hpp and of init in moe_base.hpp, compiled by g++ with the
// required_size of each kernel's buffers. They have 64 bytes more for each expert and buffer, so that all are aligned.
func TestExpertKernels(t *testing.T) {
	const qwen, deepseek = "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3-0324-BF16"
	for _, c := range []struct {
		model, format                                          string
		pools, ranks                                           int
		padded, transposed, adapting, backward, shared, cached int64
	}{
		{qwen, "bf16", 1, 1, 138412032, 1207959552, 304160768, 738541568, 600047616, 151519232},
		{qwen, "int8", 1, 1, 142934016, 606470144, 312188928, 696680448, 542539776, 151519232},
		{qwen, "fp8", 1, 1, 0, 604127232, 2637824, 969228288, 893648896, 151519232},
		{qwen, "bf16", 2, 1, 119537664, 603979776, 241246208, 667762688, 496238592, 113770496},
		{qwen, "int8", 2, 1, 123469824, 304283648, 249274368, 625901568, 446595072, 113770496},
		{qwen, "fp8", 2, 1, 0, 302063616, 2637824, 866992128, 726925312, 113770496},
		{deepseek, "bf16", 2, 4, 805306368, 11274289152, 2755805184, 8175386624, 6096945152, 1461714944},
		{deepseek, "int8", 2, 4, 830865408, 5652873216, 2784706560, 7647199232, 5493555200, 1461714944},
	} {
		text := strings.Replace(hostedText, qwen, c.model, 1) + fmt.Sprintf("kt_weight_path: w\nkt_config: "+
			"{kt_expert_weight_format: %s, kt_tp_enabled: true, kt_threadpool_count: %d}\n", c.format, c.pools)
		q := job.Request{Configs: []string{filestest.InNewFolder(t)("train.yaml", text)}, GPUs: c.ranks, FSDP: "2",
			GPU: "H100-80GB"}
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		s := newSimulation(j, newTrace(nil), newTrace(nil))
		s.sequence = j.Sequence
		l := s.experts.layers()[0]
		outside := 3*4*l.experts*l.rank*l.hidden + 2*s.experts.tokens()*l.hidden + 4*s.experts.tokens()*l.chosen +
			2*4*l.experts*l.rank*l.inner // of TP_MOE_SFT::backward and backward_gate_up_amx
		for _, size := range []struct {
			name      string
			got, want int64
		}{{"padded adapters", s.experts.padded(l), c.padded}, {"transposed", s.experts.transposedOf(l), c.transposed},
			{"forward pass", s.experts.adapting(l), c.adapting}, {"shared", s.experts.shared(l), c.shared},
			{"backward pass", s.experts.backward(l) - outside, c.backward}, {"cached", s.experts.cached(l), c.cached}} {
			if most := size.got + 12*64*l.experts; size.want < size.got || size.want > most {
				t.Errorf("%s in %s for %d pools: %s takes %d bytes, want %d", c.model, c.format, c.pools, size.name,
					size.got, size.want)
			}
		}
	}
}

// TestHostedLayer compares what a layer keeps for the backward pass with what KTMoELayerWrapper saves, with PEFT's
// adapter of its router and without a checkpoint: the input and its product with the first factor, and the scores of
// the router with the numbers of the chosen experts.
func TestHostedLayer(t *testing.T) {
	file := filestest.InNewFolder(t)
	const layers = 8
	q := job.Request{GPUs: 1, GPU: "H100-80GB",
		Model: file("config.json", `{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
			"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 16,
			"num_experts_per_tok": 4, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4,
			"head_dim": 16, "norm_topk_prob": true, "torch_dtype": "bfloat16", "decoder_sparse_step": 1}`),
		Configs: []string{file("train.yaml", "model_name_or_path: x\nfinetuning_type: lora\nlora_target: gate\n"+
			"cutoff_len: 256\nbf16: true\nuse_kt: true\nper_device_train_batch_size: 1\n"+
			"disable_gradient_checkpointing: true\n")}}
	j, err := q.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	classes, err := Run(j, Limit{})
	if err != nil {
		t.Fatal(err)
	}
	want := map[ledger.Component]int64{ledger.AdapterActivations: layers * (32768 + 4096),
		ledger.FeedForwardActivations: layers * (16384 + 8192 + 1024 + 4096),
		ledger.AutocastWeights:        layers*(1024+256) - 1024} // the input of the first needs no gradient
	for _, p := range classes[0].GPU.Phases {
		for _, h := range p.End {
			if p.Name == ledger.Forward && p.Iteration == ledger.Steady && want[h.Component] > 0 {
				if int64(h.Bytes) != want[h.Component] {
					t.Errorf("%s: %d bytes, want %d", h.Component, h.Bytes, want[h.Component])
				}
				delete(want, h.Component)
			}
		}
	}
	if len(want) > 0 {
		t.Errorf("the layers do not keep %v", want)
	}
}

// TestHostExpertsOnGPU: the GPU has neither the experts nor what they keep for the backward pass, and their routers
// have adapters.
func TestHostExpertsOnGPU(t *testing.T) {
	class, err := hosted(t, hostedText+"lora_target: gate\n", 1)
	if err != nil {
		t.Fatal(err)
	}
	const (
		attention = 2048*(4096+2*512) + 4096*2048 + 2*128
		rest      = 48*(attention+128*2048+2*2048) + 2*151936*2048 + 2048
		routers   = 48 * 8 * (2048 + 128)
	)
	for _, h := range class.GPU.Phases[0].End {
		if want := int64(2*rest + 4*routers); h.Component == ledger.Parameters && int64(h.Bytes) != want {
			t.Errorf("the GPU has %d bytes of parameters, want %d", h.Bytes, want)
		}
	}
	for _, p := range class.GPU.Phases {
		for _, h := range p.Components {
			if h.Component == ledger.FeedForwardActivations && h.Bytes > 64*ledger.MiB {
				t.Errorf("%s: feed-forward networks keep %v", p.Name, h.Bytes)
			}
		}
	}
}

// TestHostExpertsRefused lists what KTransformers does not run, and what is not planned.
func TestHostExpertsRefused(t *testing.T) {
	for text, want := range map[string]string{
		strings.Replace(hostedText, "lora\n", "full\n", 1):                                  "finetuning_type full",
		strings.Replace(hostedText, "lora\n", "freeze\n", 1):                                "trains no freeze",
		strings.Replace(hostedText, "Qwen3-30B-A3B", "Qwen3-4B", 1):                         "finds no experts",
		hostedText + "disable_gradient_checkpointing: true\nkt_cpu_activation: recompute\n": "requires gradient",
		hostedText + "kt_config: {kt_expert_weight_format: int8}\n":                         "quantized before",
		hostedText + "kt_config: {kt_expert_weight_format: int4}\n":                         "expected bf16",
		hostedText + "kt_config: {kt_backend: AMXINT4}\n":                                   "not planned",
		hostedText + "kt_config: {kt_backend: FP8, kt_expert_weight_format: bf16}\n":        "kt_backend is FP8",
		hostedText + "kt_config: {kt_tp_enabled: true, kt_threadpool_count: 5}\n":           "does not divide",
		hostedText + "stage: dpo\n":                                                         "stage dpo",
		hostedText + "optim: adamw_bnb_8bit\n":                                              "no step on the host",
		hostedText + "use_galore: true\n":                                                   "LLaMA-Factory makes",
		hostedText + "quantization_bit: 4\n":                                                "quantization_bit",
	} {
		_, err := hosted(t, text, 1)
		if err == nil || !strings.Contains(fmt.Sprint(err, " ", hint(err)), want) {
			t.Errorf("%q: got %v, want %q", text, err, want)
		}
	}
	q := job.Request{Configs: []string{filestest.InNewFolder(t)("train.yaml", hostedText)}, GPUs: 2, GPU: "H100-80GB"}
	for _, version := range []string{"", "1"} {
		q.FSDP = version
		if _, err := q.Resolve(); err == nil || !strings.Contains(err.Error(), "or with FSDP2") {
			t.Errorf("FSDP %q: got %v", version, err)
		}
	}
}

// hint returns the hint of bad input.
func hint(err error) string {
	if bad, ok := err.(*fault.Input); ok {
		return bad.Hint
	}
	return ""
}
