package fit

import (
	"reflect"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/plan/job"
)

const titan = `[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 8
seq_len = 2048
[parallelism]
data_parallel_shard_degree = 4
[activation_checkpoint]
mode = "full"
`

// TestDegreesInFile: a file of torchtitan with the degrees of a recipe says the job that the search decided.
func TestDegreesInFile(t *testing.T) {
	path := filestest.InNewFolder(t)("train.toml", titan)
	s, err := newTorchSearch(Question{Request: job.Request{Configs: []string{path}, GPUs: 4, GPU: "H100-80GB"}})
	if err != nil {
		t.Fatal(err)
	}
	pipelines := 0
	for i := range s.variants {
		v := &s.variants[i]
		decided, err := s.decided(v, 2)
		if err != nil || decided == nil {
			continue
		}
		want := decided.(*torchJob).Job
		m := &member{group: &group{variant: *v}, micro: 2, job: decided}
		made, err := s.answer.Amend(m.recipe())
		if err != nil {
			t.Fatal(err)
		}
		q := s.Request
		q.Texts = made.Texts
		got, err := q.Resolve()
		if err != nil {
			t.Fatalf("%s: %v\n%s", v.name, err, made.Texts[path])
		}
		if !reflect.DeepEqual(got.Pipeline, want.Pipeline) || got.Parallel != want.Parallel ||
			got.MicroBatch != want.MicroBatch || !reflect.DeepEqual(got.FSDP, want.FSDP) {
			t.Errorf("%s: %+v, %+v, but the search has %+v, %+v\n%s", v.name, got.Parallel, got.Pipeline, want.Parallel,
				want.Pipeline, made.Texts[path])
		}
		if want.Pipeline != nil {
			pipelines++
		}
	}
	if pipelines < 4 {
		t.Errorf("%d pipelines", pipelines)
	}
}

// TestGivenDegrees: degrees that are given stay.
func TestGivenDegrees(t *testing.T) {
	q := Question{Request: job.Request{Model: "llama-3-8b", GPUs: 8, GPU: "H100-80GB", Precision: "bf16",
		TensorParallel: 2}}
	s, err := newTorchSearch(q)
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range s.variants {
		if v.degrees.shares() {
			t.Errorf("%s", v.name)
		}
	}
}
