package simulate

import (
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// TestReference weighs the reference model of DPO with every engine: FSDP and ZeRO-3 shard it, and others hold it in
// full. An adapter's base is the reference, and log-probabilities that are computed before need none.
func TestReference(t *testing.T) {
	file := filestest.InNewFolder(t)
	llama := file("llama.json", `{"architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 256,
		"intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "torch_dtype": "bfloat16"}`)
	for name, text := range map[string]string{
		"zero2.json": `"stage": 2`, "zero3.json": `"stage": 3`,
		"host.json": `"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}`,
	} {
		file(name, `{"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {`+text+`}}`)
	}
	const (
		factory = "model_name_or_path: x\nstage: dpo\nbf16: true\ncutoff_len: 64\nfinetuning_type: "
		trl     = "model_name_or_path: x\nbeta: 0.1\nmax_length: 64\ndtype: bfloat16\n"
		whole   = 2 * (2*32000*256 + 2*(4*256*256+3*256*512+2*256) + 256)
	)
	for name, c := range map[string]struct {
		text      string
		gpu, host int64
	}{
		"DDP":                  {factory + "full\n", whole, 0},
		"ZeRO-2":               {factory + "full\ndeepspeed: zero2.json\n", whole, 0},
		"ZeRO-3":               {factory + "full\ndeepspeed: zero3.json\n", whole / 4, 0},
		"ZeRO-3 with offload":  {factory + "full\ndeepspeed: host.json\n", 0, whole / 4},
		"FSDP":                 {factory + "full\nfsdp: full_shard auto_wrap\n", whole / 4, 0},
		"LoRA":                 {factory + "lora\n", 0, 0},
		"LoRA beside a model":  {factory + "lora\nref_model: " + llama + "\n", whole, 0},
		"SimPO":                {factory + "full\npref_loss: simpo\n", 0, 0},
		"TRL":                  {trl, whole, 0},
		"TRL with LoRA":        {trl + "use_peft: true\n", 0, 0},
		"TRL, computed before": {trl + "precompute_ref_log_probs: true\n", 0, 0},
		"LLaMA-Factory's SFT":  {"model_name_or_path: x\nfinetuning_type: full\ncutoff_len: 64\nbf16: true\n", 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			q := job.Request{Configs: []string{file("train.yaml", c.text)}, Model: llama, GPUs: 4, GPU: "H100-80GB"}
			j, err := q.Resolve()
			if err != nil {
				t.Fatal(err)
			}
			classes, err := Run(j, Limit{})
			if err != nil {
				t.Fatal(err)
			}
			for where, d := range map[string]struct {
				phases []ledger.Phase
				want   int64
			}{"GPU": {classes[0].GPU.Phases, c.gpu}, "host": {classes[0].Host.Phases, c.host}} {
				var got int64
				for _, h := range d.phases[len(d.phases)-1].End {
					if h.Component == ledger.ReferenceModel {
						got = int64(h.Bytes)
					}
				}
				if got < d.want || got > d.want+4096 { // a page and the shards' rounding
					t.Errorf("%s: the reference takes %d bytes, want %d", where, got, d.want)
				}
			}
		})
	}
}
