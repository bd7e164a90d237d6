package job

import (
	"strings"
	"testing"
)

// TestPaddingIsSaid tests the note on models that padding makes larger.
func TestPaddingIsSaid(t *testing.T) {
	for _, c := range []struct {
		q    Request
		want bool
	}{
		{Request{Model: "deepseek-v3", FSDP: "2", GPUs: 8, Nodes: 256}, true},
		{Request{Model: "deepseek-v3", FSDP: "1", GPUs: 8, Nodes: 256}, false},
		{Request{Model: "deepseek-v3", FSDP: "2", GPUs: 8, Nodes: 32}, false},
		{Request{Model: "deepseek-v3", FSDP: "2", GPUs: 8, Nodes: 256, Transformers: "4.57"}, false},
		{Request{Model: "llama-3-8b", FSDP: "2", GPUs: 8, Nodes: 4}, false},
	} {
		j, err := c.q.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		said := strings.Join(j.Assumptions, "\n")
		if got := strings.Contains(said, "256 rows of model.layers.3.mlp.experts.gate_up_proj among 2048 ranks") &&
			strings.Contains(said, "dp_shard_size"); got != c.want {
			t.Errorf("%+v: %v\n%s", c.q, got, said)
		}
	}
}
