package main

import (
	"path/filepath"
	"strings"
	"testing"
)

// TestPageOfAPlanHasItsTone: a page shows a verdict in the color of what it says.
func TestPageOfAPlanHasItsTone(t *testing.T) {
	for tone, memory := range map[string]string{"good": "80GiB", "bad": "1GiB", "plain": ""} {
		file := filepath.Join(t.TempDir(), "plan.json")
		arguments := []string{"plan", "--model", "gpt2", "--cpu=false", "--precision", "fp16", "--out", file}
		if memory != "" {
			arguments = append(arguments, "--gpu-memory", memory)
		}
		_, stderr, code := runs(arguments...)
		if (code == exitDoesNotFit) != (tone == "bad") {
			t.Fatalf("exit code %d: %s", code, stderr)
		}
		page, stderr, code := runs("export", "--to", "html", file)
		if code != 0 {
			t.Fatal(stderr)
		}
		if !strings.Contains(page, `class="verdict `+tone+`"`) {
			t.Errorf("with %q of memory, the page has no verdict that is %s", memory, tone)
		}
	}
}
