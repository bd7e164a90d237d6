package model

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

// TestDocumentedModels holds docs/models.md to the causal language models of
// transformers (testdata/causal.py lists them), and to the architectures.
func TestDocumentedModels(t *testing.T) {
	text, err := os.ReadFile("testdata/causal.golden")
	if err != nil {
		t.Fatal(err)
	}
	known := Architectures()
	var planned, others []string
	for line := range strings.Lines(string(text)) {
		modelType, class, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch {
		case modelType == "#":
		case slices.Contains(known, class):
			planned = append(planned, modelType)
		default:
			others = append(others, modelType)
		}
	}
	document, err := os.ReadFile("../docs/models.md")
	if err != nil {
		t.Fatal(err)
	}
	flat := strings.Join(strings.Fields(string(document)), " ")
	var classifiers, rest []string
	for _, name := range known {
		switch {
		case strings.HasSuffix(name, "ForCausalLM"):
		case slices.Contains(classified, strings.TrimSuffix(name, "ForSequenceClassification")),
			slices.Contains(classified, strings.TrimSuffix(name, "ForTokenClassification")):
			classifiers = append(classifiers, name)
		default:
			rest = append(rest, name)
		}
	}
	for _, want := range []string{
		fmt.Sprintf("planned (%d): %s ```", len(planned), strings.Join(planned, ", ")),
		fmt.Sprintf("not yet (%d): %s ```", len(others), strings.Join(others, ", ")),
		fmt.Sprintf("with a classifier (%d): %s ```", len(classifiers), strings.Join(classifiers, ", ")),
		fmt.Sprintf("others (%d): %s ```", len(rest), strings.Join(rest, ", ")),
	} {
		if !strings.Contains(flat, want) {
			t.Errorf("docs/models.md lacks\n%s", want)
		}
	}
}
