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
		if want := fmt.Sprintf("Of %s that the planner was mended with, half are within %s, nine tenths within %s",
			row[1], row[2], row[3]); !strings.Contains(flat(readme), want) {
			t.Errorf("README.md lacks %q", want)
		}
	}
	unseen := regexp.MustCompile(`planned (\d+) published runs that no developer had seen[^.]*\. The median of the\s+` +
		`absolute error was ([\d.]+ %), the 90th percentile ([\d.]+ %)`).FindStringSubmatch(accuracy)
	if unseen == nil {
		t.Fatal("docs/accuracy.md does not say how plans of runs were that nobody had seen")
	}
	if want := fmt.Sprintf("of %s published runs that no developer had seen, half were within %s, nine tenths "+
		"within %s", unseen[1], unseen[2], unseen[3]); !strings.Contains(flat(readme), want) {
		t.Errorf("README.md lacks %q", want)
	}
	row := regexp.MustCompile(`(?m)^\| first, at 5d2b190b \| (\d+) \| (\d+) \| ([\d.]+ %) \|`)
	first := row.FindStringSubmatch(accuracy)
	if first == nil {
		t.Fatal("docs/accuracy.md does not say how plans of the rows of 5d2b190b were when nobody had seen them")
	}
	if want := fmt.Sprintf("Of %s more, chosen for what no earlier run had, %s could be planned at first, half of "+
		"them within %s", first[1], first[2], first[3]); !strings.Contains(flat(readme), want) {
		t.Errorf("README.md lacks %q", want)
	}
	if want := fmt.Sprintf("| models | %d by name", len(model.Catalog())); !strings.Contains(readme, want) {
		t.Errorf("README.md lacks %q", want)
	}
}

// flat joins the lines of a paragraph.
func flat(text string) string { return strings.Join(strings.Fields(text), " ") }
