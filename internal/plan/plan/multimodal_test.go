package plan

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// TestMultimodal compares plans of multimodal models with what PyTorch and transformers hold in the same training,
// pass by pass. testdata/multimodal.py has measured it, and says what its cases are.
func TestMultimodal(t *testing.T) {
	text, err := os.ReadFile("testdata/multimodal.golden")
	if err != nil {
		t.Fatal(err)
	}
	one, two := 1, 2
	cases := map[string]func(*job.Request){
		"trained":           func(*job.Request) {},
		"alone":             func(q *job.Request) { q.Images = &one },
		"frozen":            func(q *job.Request) { q.Freeze = []string{"vision"} },
		"projector":         func(q *job.Request) { q.Freeze = []string{"vision", "language"} },
		"recomputed":        func(q *job.Request) { q.Recompute = "full" },
		"frozen-recomputed": func(q *job.Request) { q.Recompute, q.Freeze = "full", []string{"vision"} },
		"adapted": func(q *job.Request) {
			q.Recompute, q.Adapter = "full", filestest.InNewFolder(t)("adapter_config.json", `{"peft_type": "LORA", `+
				`"r": 8, "target_modules": ".*(language_model|text_model).*\\.(q_proj|v_proj|down_proj)"}`)
		},
	}
	var torch, transformers string
	for line := range strings.Lines(string(text)) {
		if n, _ := fmt.Sscanf(line, "# torch %s transformers %s", &torch, &transformers); n == 2 {
			continue
		}
		fields := strings.Fields(line)
		q := job.Request{
			Model:     filepath.Join("../../input/model/testdata/multimodal", fields[1]+".json"),
			Precision: "bf16", MicroBatch: 2, Sequence: 256, Images: &two, ImageSize: fields[2],
			Torch: strings.Split(torch, "+")[0], Transformers: transformers,
		}
		cases[fields[0]](&q)
		var want []ledger.Bytes
		for _, field := range fields[3:] {
			var bytes ledger.Bytes
			if _, err := fmt.Sscan(field, (*int64)(&bytes)); err != nil {
				t.Fatal(err)
			}
			want = append(want, bytes)
		}
		if fields[1] == "paligemma2" {
			q.Attention = "eager"
		}
		t.Run(fields[0]+" "+fields[1], func(t *testing.T) { compareArchitecture(t, q, want) })
	}
}
