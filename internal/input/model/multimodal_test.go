package model

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestMultimodal compares multimodal models with the modules of transformers 5. Folders are of models whose operations
// are planned, and of others:
//
//	python3 testdata/parameters.py --held testdata/multimodal/*.json > testdata/multimodal.golden
//	python3 testdata/parameters.py --held testdata/ranged-multimodal/*.json > testdata/ranged-multimodal.golden
func TestMultimodal(t *testing.T) {
	for folder, planned := range map[string]bool{"multimodal": true, "ranged-multimodal": false} {
		text, err := os.ReadFile(filepath.Join("testdata", folder+".golden"))
		if err != nil {
			t.Fatal(err)
		}
		compared := 0
		for line := range strings.Lines(string(text)) {
			name, want, _ := strings.Cut(strings.TrimSpace(line), " ")
			if name == "#" {
				continue
			}
			compared++
			m, err := Load(filepath.Join("testdata", folder, name+".json"))
			if err != nil {
				t.Error(err)
			} else if got := facts(m.FuseExperts()); got != want || (m.Network != nil) != planned {
				t.Errorf("%s:\n got %s\nwant %s", name, got, want)
			}
		}
		if files, err := filepath.Glob(filepath.Join("testdata", folder, "*.json")); err != nil ||
			len(files) != compared {
			t.Errorf("compared %d of %d files of %s: %v", compared, len(files), folder, err)
		}
	}
}

// TestUnknownEncoders finds the table of tokens and the width of the language model behind an encoder whose operations
// are unknown, and the blocks of the encoder apart.
func TestUnknownEncoders(t *testing.T) {
	for name, want := range map[string][2]int{"mllama": {6, 4}, "gemma4": {4, 6}, "qwen2.5-omni-thinker": {7, 3}} {
		m, err := Load(filepath.Join("testdata/ranged-multimodal", name+".json"))
		if err != nil {
			t.Fatal(err)
		}
		with, ok := m.WithoutOperations()
		if !ok {
			t.Fatalf("%s: not planned", name)
		}
		n := with.Network
		if table := n.Stacks[1].TokenEmbedding; table != "model.language_model.embed_tokens" || n.Hidden != 128 {
			t.Errorf("%s: %s is %d wide", name, table, n.Hidden)
		}
		if got := [2]int{len(n.Stacks[0].Blocks), len(n.Stacks[1].Blocks)}; got != want {
			t.Errorf("%s: %v blocks, want %v", name, got, want)
		}
		for i, block := range n.Blocks() {
			if first := n.Opaque.Blocks[i][0].Path; !strings.HasPrefix(first+".", block.Path+".") {
				t.Errorf("%s: %s has the modules of %s", name, block.Path, first)
			}
		}
	}
}
