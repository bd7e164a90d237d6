package simulate

import (
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/plan/job"
)

const smallMixtral = `{"model_type": "mixtral", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, ` +
	`"num_hidden_layers": 2,
	"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}`

// TestShardsOfFSDP2 compares with fully_shard of torch 2.15 the first rank's shard
// of Mixtral (transformers 5.23), and the gathered buffer of a layer, behind the embedding's. With 16
// ranks most have none of the 4 experts.
func TestShardsOfFSDP2(t *testing.T) {
	file := filestest.InNewFolder(t)
	lora := file("lora.json", `{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"]}`)
	for _, c := range []struct {
		ranks           int
		adapter         string
		shard, gathered int64 // elements
	}{
		{3, "", 125294, 123780},
		{16, "", 46612, 308352},
		{16, lora, 46964, 311168},
	} {
		j, err := job.Request{Model: file("config.json", smallMixtral), GPUs: c.ranks, FSDP: "2", Precision: "fp32",
			Adapter: c.adapter}.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		e := newSimulation(j, nil, nil).engine.(*fsdp)
		var shard, gathered int64
		for _, u := range append(e.order, e.root) {
			shard += e.shardedBytes(u) / 4
		}
		for _, p := range e.order[1].parameters {
			gathered += e.padded(p)
		}
		if shard != c.shard || gathered != c.gathered {
			t.Errorf("%d ranks: a shard of %d elements and %d gathered, torch has %d and %d",
				c.ranks, shard, gathered, c.shard, c.gathered)
		}
	}
}

// TestFusedExperts tests adapters and quantization with transformers 5, where
// experts and routers are not linear modules that PEFT and bitsandbytes find.
func TestFusedExperts(t *testing.T) {
	file := filestest.InNewFolder(t)
	qwen3 := strings.NewReplacer("mixtral", "qwen3_moe", "num_local_experts",
		`moe_intermediate_size": 48, "num_experts`).Replace(smallMixtral)
	qwen2 := strings.NewReplacer("qwen3_moe", "qwen2_moe", `"moe_`,
		`"shared_expert_intermediate_size": 80, "moe_`).Replace(qwen3)
	for _, c := range []struct {
		name, model, adapter string
		trained              int64 // PEFT 0.21's count, 0 if refused
	}{
		{"attention", smallMixtral, `"target_modules": ["q_proj", "v_proj"]`, 1792},
		{"no default", smallMixtral, `"r": 8`, 0},
		{"experts", smallMixtral, `"target_modules": ["q_proj", "w2"]`, 6144},
		{"an expert by its path", smallMixtral,
			`"target_modules": ["q_proj", "model.layers.0.block_sparse_moe.experts.0.w2"]`, 6144},
		{"half of the gates", smallMixtral, `"target_modules": ["q_proj", "w1"]`, 0},
		{"dropout of experts", smallMixtral, `"target_modules": ["q_proj", "w2"], "lora_dropout": 0.1`, 0},
		{"a name of others", smallMixtral, `"target_modules": ["q_proj", "down_proj"]`, 1024},
		{"everything", smallMixtral, `"target_modules": "all-linear"`, 25632},
		{"a pattern of experts", qwen3, `"target_modules": ".*(q_proj|experts.*_proj)"`, 14848},
		{"a pattern of old experts", qwen3, `"target_modules": ".*(q_proj|experts.gate_proj)"`, 0},
		{"a pattern of both halves", qwen3, `"target_modules": ".*(q_proj|experts.(gate|up)_proj)"`, 11264},
		{"a pattern of attention", qwen3, `"target_modules": ".*self_attn.*_proj"`, 3584},
		{"a pattern of a layer", qwen3, `"target_modules": ".*layers.1.*o_proj"`, 1024},
		{"a pattern of a layer's experts", qwen3, `"target_modules": ".*layers.1.*(o_proj|down_proj)"`, 4608},
		{"a router", qwen3, `"target_modules": ["q_proj", "gate"]`, 1568},
		{"parameters", qwen3,
			`"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "mlp.experts.down_proj"]`, 9728},
		{"ranks of parameters", qwen3,
			`"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "mlp.experts.down_proj"],
			"rank_pattern": {"down_proj": 2, "0.mlp.experts.gate_up_proj": 16}`, 15616},
		{"parameters alone", qwen3, `"target_modules": [], "target_parameters": ["experts.down_proj"]`, 3584},
		{"parameters without modules", qwen3, `"target_parameters": ["experts.down_proj"]`, 3584},
		{"parameters that are not there", qwen3,
			`"target_modules": ["q_proj"], "target_parameters": ["expert.down_proj"]`, 1024},
		{"parameters of Qwen2", qwen2,
			`"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "gate.weight"]`, 5152},
		{"parameters and layers", qwen3, `"target_modules": ["q_proj"], "layers_to_transform": [1],
			"target_parameters": ["experts.down_proj"]`, 4096},
		{"everything of Qwen2", qwen2, `"target_modules": "all-linear"`, 7560},
		{"shared experts of Qwen2", qwen2, `"target_modules": ["q_proj", "down_proj"]`, 2176},
		{"a router of Qwen2", qwen2, `"target_modules": ["q_proj", "gate"]`, 0},
		{"IA3", smallMixtral, `"peft_type": "IA3"`, 128},
		{"IA3 of a router", smallMixtral, `"peft_type": "IA3", "target_modules": ["gate"], "feedforward_modules": []`,
			0},
	} {
		text := `{"peft_type": "LORA", "r": 4, ` + c.adapter + `}`
		if strings.Contains(c.adapter, "peft_type") || strings.Contains(c.adapter, `"r"`) {
			text = `{"peft_type": "LORA", ` + c.adapter + `}`
			text = strings.Replace(text, `"peft_type": "LORA", "peft_type"`, `"peft_type"`, 1)
		}
		q := job.Request{Model: file("config.json", c.model), Adapter: file("adapter.json", text)}
		j, err := q.Resolve()
		if err != nil {
			if c.trained > 0 {
				t.Errorf("%s: %v", c.name, err)
			}
			continue
		}
		_, list := makeParameters(j)
		var trained int64
		for _, p := range list {
			if p.Trainable {
				trained += p.Elements
			}
		}
		if trained != c.trained {
			t.Errorf("%s: %d are trained, PEFT trains %d", c.name, trained, c.trained)
		}
		if q.Transformers = "4.57"; c.trained == 0 {
			if _, err := q.Resolve(); err != nil {
				t.Errorf("%s, transformers 4: %v", c.name, err)
			}
		}
	}
	for _, text := range []string{`"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"topk_ratio": ` +
		`0.1, "update_interval": 4}}`,
		`"stage": 1}, "tensor_parallel": {"autotp_size": 2}`} {
		q := job.Request{Model: file("config.json", qwen3), GPUs: 2,
			DeepSpeed: file("ds.json",
				`{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {`+text+`}`)}
		if _, err := q.Resolve(); err == nil {
			t.Errorf("%s is planned with fused experts", text)
		}
		q.Transformers = "4.57"
		if _, err := q.Resolve(); err != nil {
			t.Error(err)
		}
	}
	q := job.Request{Model: "mixtral-8x7b",
		Adapter: file("adapter.json", `{"peft_type": "LORA", "target_modules": ["q_proj"]}`), Quantization: "nf4",
		Precision: "bf16"}
	stored := map[string]int64{}
	for _, q.Transformers = range []string{"4.57", "5.0"} {
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		_, list := makeParameters(j)
		for _, p := range list {
			stored[q.Transformers] += p.Bytes()
		}
	}
	const experts, routers = 32 * 8 * 3 * 4096 * 14336, 32 * 8 * 4096
	if more := stored["5.0"] - stored["4.57"]; more != 2*(experts+routers)-(experts+routers)*9/16 {
		t.Errorf("Mixtral in 4 bits takes %d bytes with transformers 5, %d with transformers 4", stored["5.0"],
			stored["4.57"])
	}
}
