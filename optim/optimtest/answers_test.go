package optimtest

import (
	"os"
	"path/filepath"
	"testing"
)

// TestQuestions: the text of files decides a question, those that a program imports too, and their names do not.
func TestQuestions(t *testing.T) {
	written := func(folder, name, text string) string {
		path := filepath.Join(folder, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	question := func(program, beside, config string) string {
		folder := t.TempDir()
		written(folder, "train.py", beside)
		return hashOf(t, []string{written(folder, "a.py", program), "--config", written(folder, "c.json", config)})
	}
	const program = "import json\nimport train\n"
	first := question(program, "1", "{}")
	if again := question(program, "1", "{}"); again != first {
		t.Errorf("%s, then %s", first, again)
	}
	for _, other := range []string{question(program+"#", "1", "{}"), question(program, "2", "{}"),
		question(program, "1", "[]")} {
		if other == first {
			t.Error("another question has the same hash")
		}
	}
}
