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

// TestModalities compares plans of models that read images or sound with what PyTorch and transformers hold in the same
// training, pass by pass. testdata/modalities.py has measured it, and says what its cases are.
func TestModalities(t *testing.T) {
	text, err := os.ReadFile("testdata/modalities.golden")
	if err != nil {
		t.Fatal(err)
	}
	var torch, transformers string
	for line := range strings.Lines(string(text)) {
		if n, _ := fmt.Sscanf(line, "# torch %s transformers %s", &torch, &transformers); n == 2 {
			continue
		}
		fields := strings.Fields(line)
		q := job.Request{
			Model:     filepath.Join("../../input/model/testdata/variants", fields[0]+".json"),
			Precision: fields[1], MicroBatch: 2, Attention: fields[2],
			Torch: strings.Split(torch, "+")[0], Transformers: transformers,
		}
		if name := fields[0]; strings.HasPrefix(name, "whisper") || strings.Contains(name, "lip") {
			q.Sequence = 256
		}
		if fields[3] != "none" {
			q.Recompute = "full"
		}
		if fields[3] == "adapted" {
			q.Adapter = filestest.InNewFolder(t)("adapter_config.json", `{"peft_type": "LORA", "r": 8, `+
				`"target_modules": ".*\\.(q_proj|v_proj|query|value)"}`)
		}
		var want []ledger.Bytes
		for _, field := range fields[4:] {
			var bytes ledger.Bytes
			if _, err := fmt.Sscan(field, (*int64)(&bytes)); err != nil {
				t.Fatal(err)
			}
			want = append(want, bytes)
		}
		t.Run(strings.Join(fields[:4], " "), func(t *testing.T) { compareArchitecture(t, q, want) })
	}
}
