package main

import (
	"os"
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

// TestHTMLBesideTheResult: --html changes nothing on stdout, and its page is that of export.
func TestHTMLBesideTheResult(t *testing.T) {
	folder := t.TempDir()
	page, document := filepath.Join(folder, "plan.html"), filepath.Join(folder, "plan.json")
	plain, stderr, code := runs("plan", "--model", "gpt2", "--gpu-memory", "80GiB", "--markdown")
	if code != 0 || !strings.HasPrefix(plain, "## Plan of gpt2\n") {
		t.Fatalf("%s%s", stderr, plain)
	}
	out, stderr, code := runs("plan", "--model", "gpt2", "--gpu-memory", "80GiB", "--markdown", "--html", page, "--out",
		document)
	if code != 0 || out != plain {
		t.Errorf("stdout differs with --html: %s%s", stderr, out)
	}
	written, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if exported, _, _ := runs("export", "--to", "html", document); exported != string(written) {
		t.Error("the page is not that of export")
	}
	if _, stderr, code = runs("plan", "--model", "gpt2", "--html", folder); code != exitInput {
		t.Errorf("a folder as --html: exit code %d: %s", code, stderr)
	}
}
