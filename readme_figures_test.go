package plimsoll

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"plimsoll/internal/input/model"
)

// TestReadmeFigures holds the figures of README.md against those of docs/accuracy.md and of the catalog.
func TestReadmeFigures(t *testing.T) {
	readme, accuracy := read(t, "README.md"), read(t, "docs/accuracy.md")
	for shown, program := range map[string]string{"`plimsoll plan`": "plimsoll plan",
		"DeepSpeed's estimator": "DeepSpeed's estimator", "accelerate estimate-memory": "accelerate estimate-memory"} {
		row := regexp.MustCompile(`(?m)^\| ` + program + ` \| (\d+) \| ([\d.]+ %) \| ([\d.]+ %)`).FindStringSubmatch(accuracy)
		if row == nil {
			t.Fatalf("docs/accuracy.md has no row of %s", program)
		}
		want := fmt.Sprintf("%s off at the median of %s runs", row[2], row[1])
		if line := regexp.MustCompile(`(?m)^\| ` + regexp.QuoteMeta(shown) + ` \|.*$`).FindString(readme); !strings.Contains(
			line, want) {
			t.Errorf("README.md, %s: %q lacks %q", program, line, want)
		}
		if program != "plimsoll plan" {
			continue
		}
		if want := fmt.Sprintf("half of %s public measurements are within %s, nine tenths within %s", row[1], row[2],
			row[3]); !strings.Contains(readme, want) {
			t.Errorf("README.md lacks %q", want)
		}
	}
	if want := fmt.Sprintf("| models | %d by name", len(model.Catalog())); !strings.Contains(readme, want) {
		t.Errorf("README.md lacks %q", want)
	}
}
