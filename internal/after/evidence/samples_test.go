package evidence

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
)

// shared returns a file of the data that stands beside the repository. On a machine without it the test is skipped.
func shared(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile("../../../../shared/" + name)
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skipf("without the shared data: %v", err)
	}
	return text
}

// TestSamplesOfFormats: every sample is recognized, and its groups have the values of the sample.
func TestSamplesOfFormats(t *testing.T) {
	var samples []struct {
		Kind, Line string
		Groups     map[string]string
	}
	if err := json.Unmarshal(shared(t, "data/format-samples.json"), &samples); err != nil {
		t.Fatal(err)
	}
	if len(samples) < 30 {
		t.Fatalf("%d samples", len(samples))
	}
	for _, sample := range samples {
		if sample.Kind == "ROW" { // a row is read by the columns of its table
			groups := processRow.FindStringSubmatch(clean(sample.Line, 1).string)
			if groups == nil || groups[1] != sample.Groups["pid"] || groups[2] != sample.Groups["rest"] {
				t.Errorf("%q: groups %q", sample.Line, groups)
			}
			continue
		}
		var hits []int
		x := patternIndex()
		x.find([]byte(sample.Line), &hits)
		found := false
		for _, hit := range hits {
			p := x.patterns[hit]
			m := p.in(sample.Line)
			if m == nil {
				continue
			}
			found = true
			for group, want := range sample.Groups {
				if got := m.get(group); got != want {
					t.Errorf("%s: %q: group %s is %q, want %q", p.name, sample.Line, group, got, want)
				}
			}
			break
		}
		if !found {
			t.Errorf("%s: %q is not recognized", sample.Kind, sample.Line)
		}
		source, err := Read("sample", strings.NewReader(sample.Line+"\n"))
		if err != nil || len(source.Findings) == 0 {
			t.Errorf("%q: %v, %v", sample.Line, source, err)
		}
	}
}
