package explain

import (
	"encoding/json"
	"path/filepath"
	"testing"

	"golang.org/x/tools/txtar"
)

// fewestHealthy is how many logs of healthy programs there must be.
const fewestHealthy = 200

// TestHealthyLogs: no program that ended well is called a failure. The logs are those of trainers, launchers and the
// tests of libraries that were run, and the cases of the corpus in which nothing is wrong.
func TestHealthyLogs(t *testing.T) {
	count := 0
	archives, _ := filepath.Glob(filepath.Join("testdata", "healthy", "*.txtar"))
	for _, name := range archives {
		archive, err := txtar.ParseFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range archive.Files {
			count++
			if e := explainText(t, string(f.Data)); e.Cause.Resource != None {
				t.Errorf("%s: %s: %q (%s): %s: %+v", name, f.Name, e.Cause.Resource, e.Confidence, e.Cause.Text,
					e.Evidence)
			}
		}
	}
	cases, _ := filepath.Glob(filepath.Join("testdata", "corpus", "*", "*.txtar"))
	for _, name := range cases {
		archive, err := txtar.ParseFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range archive.Files {
			var want expectation
			if f.Name == "expect.json" && json.Unmarshal(f.Data, &want) == nil && want.Resource == None {
				count++
				if faults, _ := judgeCase(t, name); len(faults) > 0 {
					t.Errorf("%s: %v", name, faults)
				}
			}
		}
	}
	if count < fewestHealthy {
		t.Errorf("%d healthy logs, expected %d or more", count, fewestHealthy)
	}
	t.Logf("%d healthy logs", count)
}
