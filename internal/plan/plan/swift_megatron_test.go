package plan

import (
	"strings"
	"testing"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// TestSecondModelOfMegatron: DPO of ms-swift holds the parameters a second time, and twice the tokens of a micro batch.
func TestSecondModelOfMegatron(t *testing.T) {
	held := map[string]map[ledger.Component]ledger.Bytes{}
	for _, command := range []string{"sft", "rlhf"} {
		text := "NPROC_PER_NODE=1 megatron " + command + " --model qwen2.5-0.5b --max_length 1024\n"
		q := job.Request{MegatronArguments: job.MegatronArguments{Megatron: "train.sh"}, GPU: "H100",
			Texts: files.Texts{"train.sh": []byte(text)}}
		j, err := q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		p, err := New(j)
		if err != nil {
			t.Fatal(err)
		}
		held[command] = map[ledger.Component]ledger.Bytes{}
		for _, phase := range p.Devices[0].Phases {
			for _, c := range phase.Components {
				held[command][c.Component] = max(held[command][c.Component], c.Bytes)
			}
		}
	}
	alone, pairs := held["sft"], held["rlhf"]
	if pairs[ledger.ReferenceModel] != alone[ledger.Parameters] || alone[ledger.ReferenceModel] != 0 {
		t.Errorf("%v of a second model, %v of parameters", pairs[ledger.ReferenceModel], alone[ledger.Parameters])
	}
	logits, of := pairs[ledger.LogitsAndLoss], alone[ledger.LogitsAndLoss]
	if pairs[ledger.Batch] != 2*alone[ledger.Batch] || logits < 2*of-1024 {
		t.Errorf("%v and %v of a batch, %v and %v of logits", pairs[ledger.Batch], alone[ledger.Batch], logits, of)
	}
}

// TestMegatronOfSwift3: commands of ms-swift's releases 3 are those of today with other names and other defaults.
func TestMegatronOfSwift3(t *testing.T) {
	resolve := func(arguments string) (*job.Job, error) {
		return job.Request{MegatronArguments: job.MegatronArguments{Megatron: "train.sh"}, GPU: "H100",
			Texts: files.Texts{"train.sh": []byte("NPROC_PER_NODE=2 megatron sft " + arguments + "\n")}}.Resolve()
	}
	const both = " --max_length 1024 --tensor_model_parallel_size 2 --lora_rank 4"
	now, err := resolve("--model qwen3-0.6b --tuner_type lora --cross_entropy_loss_fusion false " +
		"--moe_grouped_gemm false --save_safetensors false" + both)
	if err != nil {
		t.Fatal(err)
	}
	for _, before := range []string{
		"--load Qwen3-0.6B-mcore --train_type lora --save out --max_epochs 2 --finetune true --num_workers 8",
		"--load /models/Qwen3-0.6B-Mcore/ --train_type lora --no_load_optim true --seq_length 1024",
	} {
		j, err := resolve(before + both)
		if err != nil {
			t.Errorf("%s: %v", before, err)
			continue
		}
		got, want := *j.Megatron.Megatron, *now.Megatron.Megatron
		if got.FusesLoss != want.FusesLoss || got.GroupedGEMM != want.GroupedGEMM || got.Hidden != want.Hidden ||
			got.Sequence != want.Sequence || got.Adapter == nil || got.Adapter.Rank != want.Adapter.Rank ||
			j.World != 2 {
			t.Errorf("%s: got %+v, want %+v", before, got, want)
		}
	}
	for arguments, want := range map[string]string{
		"--load Qwen3-0.6B-mcore --num_query_groups 1":       "num_query_groups is 1: it goes before the config.json",
		"--load Qwen3-0.6B-mcore --adapter_load a":           `adapters is "a": it loads adapters`,
		"--load Qwen3-0.6B-mcore --extra_megatron_kwargs x":  "megatron_extra_kwargs is",
		"--load Nobodys-Model-mcore":                         "Nobodys-Model",
		"--load Qwen3-0.6B-mcore --tensor_model_paralel 2":   "is no argument of ms-swift's megatron commands",
		"--load_safetensors true --train_type lora --lora 1": "is no argument",
	} {
		if _, err := resolve(arguments + " --max_length 64"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", arguments, err, want)
		}
	}
}
