package job

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestPartitionsOfDeepSpeed holds cuts against those of partition_uniform and partition_balanced of DeepSpeed 0.19.8.
func TestPartitionsOfDeepSpeed(t *testing.T) {
	for _, c := range []struct {
		weights []float64
		parts   int
		want    []int
	}{
		{[]float64{28, 3, 3, 3, 3, 28}, 2, []int{0, 3, 6}},
		{[]float64{28, 3, 3, 3, 3, 28}, 3, []int{0, 1, 5, 6}},
		{[]float64{0, 1, 1, 1, 1, 1, 0}, 2, []int{0, 4, 7}},
		{[]float64{0, 1, 1, 1, 1, 1, 0}, 3, []int{0, 3, 5, 7}},
		{[]float64{10, 7, 7, 7, 7, 7, 7, 7, 7, 7, 10}, 4, []int{0, 3, 6, 9, 11}},
		{[]float64{1, 1, 1, 1, 1}, 4, []int{0, 2, 3, 4, 5}},
	} {
		if got := partitionBalanced(c.weights, c.parts); !slices.Equal(got, c.want) {
			t.Errorf("%v in %d parts: %v, expected %v", c.weights, c.parts, got, c.want)
		}
	}
	for parts, want := range map[int][]int{3: {0, 4, 8, 11}, 4: {0, 3, 6, 9, 11}, 6: {0, 2, 4, 6, 8, 10, 11}} {
		if got := partitionUniform(11, parts); !slices.Equal(got, want) {
			t.Errorf("11 layers in %d parts: %v, expected %v", parts, got, want)
		}
	}
}

// TestPipelineEngine decides jobs of DeepSpeed's pipeline engine, or refuses them as it does.
func TestPipelineEngine(t *testing.T) {
	for _, c := range []struct {
		text    string
		request Request
		refused string
		blocks  []int64 // of each stage
	}{
		{`"zero_optimization": {"stage": 1}`, Request{PipelineParallel: 2}, "", []int64{16, 16}},
		{`"train_batch_size": 32`, Request{PipelineParallel: 4}, "", []int64{7, 9, 9, 7}},
		{``, Request{PipelineParallel: 4, PipelinePartition: "uniform"}, "", []int64{8, 9, 8, 7}},
		{``, Request{PipelineParallel: 4, PipelinePartition: "type:transformer"}, "", []int64{8, 8, 8, 8}},
		{``, Request{PipelineParallel: 4, PipelinePartition: "best"}, "partition_method", nil},
		{``, Request{PipelineParallel: 4, DeepSpeedVersion: "0.12.4"}, "#4312", nil},
		{``, Request{PipelineParallel: 3}, "that share micro batches", nil},
		{``, Request{PipelineParallel: 4, TensorParallel: 2}, "with tensor", nil},
		{``, Request{PipelineParallel: 4, PipelineSchedule: "GPipe"}, "schedule of its own", nil},
		{`"zero_optimization": {"stage": 2}`, Request{PipelineParallel: 4}, "incompatible with pipeline", nil},
		{`"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}`, Request{PipelineParallel: 4},
			"offloaded optimizer", nil},
		{`"pipeline": {"activation_checkpoint_interval": 2}`, Request{PipelineParallel: 4}, "several layers", nil},
	} {
		file := filepath.Join(t.TempDir(), "zero.json")
		text := `{"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 1`
		if c.text != "" {
			text += ", " + c.text
		}
		if err := os.WriteFile(file, []byte(text+"}"), 0o600); err != nil {
			t.Fatal(err)
		}
		q := c.request
		q.Model, q.GPUs, q.DeepSpeed = "llama-3-8b", 8, file
		j, err := q.Resolve()
		if (err != nil) != (c.refused != "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%s %+v: refused for %v, expected %q", c.text, c.request, err, c.refused)
		}
		if err != nil {
			continue
		}
		var blocks []int64
		for _, stage := range j.Pipeline.Table {
			blocks = append(blocks, stage[0].Layers)
		}
		if !slices.Equal(blocks, c.blocks) {
			t.Errorf("%s %+v: %v blocks, expected %v", c.text, c.request, blocks, c.blocks)
		}
		if strings.Contains(c.text, "train_batch_size") && j.Pipeline.Micros != 16 {
			t.Errorf("32 sequences on 2 pipelines are %d micro batches of each, expected 16", j.Pipeline.Micros)
		}
	}
}
