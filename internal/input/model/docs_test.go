package model

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/input/recipe/strict"
)

// TestDocumentedModels holds docs/models.md to the causal language models of
// transformers (testdata/causal.py lists them), and to the architectures.
func TestDocumentedModels(t *testing.T) {
	text, err := os.ReadFile("testdata/causal.golden")
	if err != nil {
		t.Fatal(err)
	}
	known, ranged := Architectures(), rangedClasses(t)
	var planned, ranges, others []string
	for line := range strings.Lines(string(text)) {
		modelType, class, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch {
		case modelType == "#":
		case slices.Contains(ranged, class):
			ranges = append(ranges, modelType)
		case slices.Contains(known, class):
			planned = append(planned, modelType)
		default:
			others = append(others, modelType)
		}
	}
	document, err := os.ReadFile("../../../docs/models.md")
	if err != nil {
		t.Fatal(err)
	}
	flat := strings.Join(strings.Fields(string(document)), " ")
	var classifiers, rest, remote []string
	for _, name := range known {
		switch {
		case slices.Contains(ranged, name):
			if !strings.Contains(string(text), " "+name+"\n") {
				remote = append(remote, name)
			}
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
		fmt.Sprintf("as a range (%d): %s ```", len(ranges), strings.Join(ranges, ", ")),
		fmt.Sprintf("others as a range (%d): %s ```", len(remote), strings.Join(remote, ", ")),
		fmt.Sprintf("not yet (%d): %s ```", len(others), strings.Join(others, ", ")),
		fmt.Sprintf("with a classifier (%d): %s ```", len(classifiers), strings.Join(classifiers, ", ")),
		fmt.Sprintf("others (%d): %s ```", len(rest), strings.Join(rest, ", ")),
	} {
		if !strings.Contains(flat, want) {
			t.Errorf("docs/models.md lacks\n%s", want)
		}
	}
}

// rangedClasses returns the architectures whose operations are unknown. A
// description says so before it reads its configuration, which has no fields here.
func rangedClasses(t *testing.T) []string {
	var classes []string
	for _, a := range architectures {
		root := scope{construction: &construction{
			config: &config{Document: &strict.Document{}, fields: map[string]strict.Member{}},
			made:   &made{network: &Network{}}}}
		if _, err := unlessRefused(func() bool { a.describe(root); return true }); err == nil {
			t.Errorf("%s is described without any size", a.name)
		}
		if root.opaque {
			classes = append(classes, a.name)
		}
	}
	if len(classes) == 0 {
		t.Fatal("no architecture is planned as a range")
	}
	return classes
}
