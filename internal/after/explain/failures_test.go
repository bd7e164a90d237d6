package explain

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/after/evidence"
)

// failures is the folder of failures that lie beside the repository: cases, last lines and messages of GPUs.
const failures = "../../../../shared/data/failures"

// mostWrong is the share of wrong answers that are allowed, in percent. None may be certain.
var mostWrong = map[string]int{"cases": 5, "last lines": 5, "messages": 10}

// TestFailures explains failures of others, and counts right answers.
func TestFailures(t *testing.T) {
	if _, err := os.Stat(failures); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("there is no folder %s: CI needs the failures", failures)
		}
		t.Skipf("there is no folder %s with failures", failures)
	}
	for _, set := range []struct {
		name  string
		judge func(*testing.T) []verdict
	}{{"cases", judgeFolders}, {"last lines", judgeLastLines}, {"messages", judgeMessages}} {
		verdicts := set.judge(t)
		right, sure := 0, 0
		for _, v := range verdicts {
			if v.fault == "" {
				right++
				continue
			}
			if v.sure {
				sure++
			}
			t.Logf("%s: %s: %s", set.name, v.name, v.fault)
		}
		t.Logf("%s: %d of %d right, %d wrong and certain", set.name, right, len(verdicts), sure)
		if wrong := len(verdicts) - right; 100*wrong > mostWrong[set.name]*len(verdicts) || sure > 0 {
			t.Errorf("%s: %d of %d are wrong and %d wrong and certain: expected %d %% at most, and none",
				set.name, wrong,
				len(verdicts), sure, mostWrong[set.name])
		}
	}
}

// verdict is on one answer.
type verdict struct {
	name, fault string
	sure        bool // the answer was certain
}

// truth is what is known of a failure.
type truth struct {
	Resource  *Resource  `json:"resource"`
	Also      []Resource `json:"also_right"`
	Rank      *int       `json:"rank"`
	Phase     *string    `json:"phase"`
	Mention   []string   `json:"must_mention"`
	NotBlame  []string   `json:"must_not_blame"`
	Decidable bool       `json:"decidable"`
}

// foreign are resources that others call by another name.
var foreign = map[Resource]Resource{"memlock": LockedMemory, "shm": SharedMemory, "unknown": Undetermined}

func named(r Resource) Resource { return cmp.Or(foreign[r], r) }

func judgeFolders(t *testing.T) (verdicts []verdict) {
	folders, _ := filepath.Glob(filepath.Join(failures, "*", "truth.json"))
	for _, file := range folders {
		var want truth
		if err := json.Unmarshal(readFile(t, file), &want); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		var in Inputs
		names, _ := filepath.Glob(filepath.Join(filepath.Dir(file), "*"))
		for _, name := range names {
			if name != file {
				in.Sources = append(in.Sources, readSource(t, filepath.Base(name), readFile(t, name)))
			}
		}
		e := Explain(in)
		fault := want.fault(e)
		verdicts = append(verdicts, verdict{filepath.Base(filepath.Dir(file)), fault, e.Confidence == Certain})
	}
	return verdicts
}

func (want *truth) fault(e *Explanation) string {
	got := e.Cause.Resource
	right := slices.ContainsFunc(want.Also, func(r Resource) bool { return named(r) == got })
	if want.Resource != nil {
		right = right || named(*want.Resource) == got
	}
	if !want.Decidable {
		right = right || got == Undetermined
	}
	text, err := json.Marshal(e)
	if err != nil {
		return err.Error()
	}
	answer := fmt.Sprintf("%q (%s): %s", got, e.Confidence, e.Cause.Text)
	switch {
	case !right:
		return answer
	case want.Rank != nil && (e.Cause.Rank == nil || *e.Cause.Rank != *want.Rank):
		return fmt.Sprintf("rank %d is expected: %s", *want.Rank, answer)
	case want.Phase != nil && (e.Cause.Phase == nil || string(*e.Cause.Phase) != *want.Phase):
		return fmt.Sprintf("phase %s is expected: %s", *want.Phase, answer)
	}
	for _, mention := range want.Mention {
		if !regexp.MustCompile("(?i)" + mention).Match(text) {
			return fmt.Sprintf("nothing mentions %s: %s", mention, answer)
		}
	}
	return ""
}

func judgeLastLines(t *testing.T) (verdicts []verdict) {
	type line struct {
		Text    string     `json:"text"`
		Unknown bool       `json:"also_unknown"`
		Right   []Resource `json:"right"`
	}
	for _, l := range readLines[line](t, "last-lines.jsonl") {
		e := explainText(t, l.Text)
		v := verdict{name: l.Text, sure: e.Confidence == Certain}
		is := func(r Resource) bool { return named(r) == e.Cause.Resource }
		if !slices.ContainsFunc(l.Right, is) && (!l.Unknown || e.Cause.Resource != Undetermined) {
			v.fault = fmt.Sprintf("%q (%s): %s", e.Cause.Resource, e.Confidence, e.Cause.Text)
		}
		verdicts = append(verdicts, v)
	}
	return verdicts
}

func judgeMessages(t *testing.T) (verdicts []verdict) {
	type message struct {
		Text   string `json:"text"`
		Detail string `json:"detail"`
	}
	for _, m := range readLines[message](t, "gpu-messages.jsonl") {
		e := explainText(t, m.Text+"\n")
		v := verdict{name: m.Text, sure: e.Confidence == Certain}
		if e.Cause.Resource != GPU || e.Cause.Detail != m.Detail {
			v.fault = fmt.Sprintf("%q is expected: %q (%s): %s", m.Detail, e.Cause.Detail, e.Confidence, e.Cause.Text)
		}
		verdicts = append(verdicts, v)
	}
	return verdicts
}

func explainText(t *testing.T, text string) *Explanation {
	t.Helper()
	return Explain(Inputs{Sources: []*evidence.Source{readSource(t, "train.log", []byte(text))}})
}

func readSource(t *testing.T, name string, text []byte) *evidence.Source {
	t.Helper()
	source, err := evidence.Read(name, bytes.NewReader(text))
	if err != nil {
		t.Fatalf("%s is not read: %v", name, err)
	}
	return source
}

func readFile(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// readLines reads a file of JSON lines.
func readLines[T any](t *testing.T, name string) (values []T) {
	t.Helper()
	lines := bufio.NewScanner(bytes.NewReader(readFile(t, filepath.Join(failures, name))))
	for lines.Scan() {
		if strings.TrimSpace(lines.Text()) == "" {
			continue
		}
		var value T
		if err := json.Unmarshal(lines.Bytes(), &value); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		values = append(values, value)
	}
	return values
}
