package plan

import (
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
