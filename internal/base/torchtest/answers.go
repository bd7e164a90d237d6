package torchtest

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
)

var record = flag.Bool("record", false, "ask Python, and record its answers in testdata/answers")

// Asker runs Python programs: what follows the name of the interpreter is a file, or -c and a program, and arguments.
// It writes what programs print to standard output.
type Asker func(t testing.TB, arguments ...string) ([]byte, error)

// Fresh runs each program in an interpreter that starts anew, and has modules.
func Fresh(modules ...string) Asker {
	return func(t testing.TB, arguments ...string) ([]byte, error) {
		t.Helper()
		return exec.Command(Python(t, modules...), arguments...).Output()
	}
}

// Forked runs programs in forks of an interpreter that has imported modules.
func Forked(modules ...string) Asker {
	return func(t testing.TB, arguments ...string) ([]byte, error) {
		t.Helper()
		return Imported(t, modules...).Output(arguments...)
	}
}

// recording is an answer of a program.
type recording struct {
	Question string            `json:"question"` // a hash of the program and of its arguments
	Versions map[string]string `json:"versions"` // of the packages that answered
	Answer   json.RawMessage   `json:"answer"`   // what the test reads of it
}

// Answer returns what a program prints, a JSON document of which the test reads T. The tree has a recording of it, so
// that every machine compares with real packages in no time. Without -short, Python answers anew, and equally if it has
// the packages of the recording. With -record, the new answer is recorded.
func Answer[T any](t testing.TB, ask Asker, arguments ...string) T {
	t.Helper()
	return answer[T](t, ask, true, arguments)
}

// Measured is [Answer] for a program that measures real memory, which is never quite the same.
func Measured[T any](t testing.TB, ask Asker, arguments ...string) T {
	t.Helper()
	return answer[T](t, ask, false, arguments)
}

func answer[T any](t testing.TB, ask Asker, exact bool, arguments []string) (result T) {
	t.Helper()
	known, question := recorded(t), hashOf(t, arguments)
	if !*record && known.Question != question {
		t.Fatalf("testdata/answers has no answer to this program with these arguments. Record it: %s", command(t))
	}
	if testing.Short() && !*record || !*record && !hasPython() {
		t.Logf("Python is not asked: the answer is a recording of %v", known.Versions)
		decode(t, known.Answer, &result)
		return result
	}
	printed, err := ask(t, arguments...)
	if err != nil {
		t.Fatal(err, stderrOf(err))
	}
	decode(t, lastLine(printed), &result)
	now := recording{question, versions(t), encode(t, result)}
	switch {
	case *record:
		keep(t, now)
	case !maps.Equal(now.Versions, known.Versions):
		t.Logf("Python has %v, the recording is of %v", now.Versions, known.Versions)
	case exact && !bytes.Equal(now.Answer, known.Answer):
		t.Errorf("Python answers %s, recorded is %s: record anew: %s", now.Answer, known.Answer, command(t))
	}
	return result
}

// command records what this test asks.
func command(t testing.TB) string {
	return "go test -run '^" + topLevel(t) + "$' -record, in the folder of the test"
}

func topLevel(t testing.TB) string {
	name, _, _ := strings.Cut(t.Name(), "/")
	return name
}

func decode(t testing.TB, text []byte, into any) {
	t.Helper()
	if err := json.Unmarshal(text, into); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
}

func encode(t testing.TB, value any) []byte {
	t.Helper()
	text, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// lastLine leaves out what libraries print before the document.
func lastLine(printed []byte) []byte {
	printed = bytes.TrimSpace(printed)
	if json.Valid(printed) {
		return printed
	}
	return printed[bytes.LastIndexByte(printed, '\n')+1:]
}

func stderrOf(err error) string {
	if failed, ok := err.(*exec.ExitError); ok {
		return string(failed.Stderr)
	}
	return ""
}

// hashOf returns a hash of what decides an answer. Of an argument that names a file, its text counts and not its name;
// of a folder, nothing.
func hashOf(t testing.TB, arguments []string) string {
	t.Helper()
	sum := sha256.New()
	for _, a := range arguments {
		text := a
		switch info, err := os.Stat(a); {
		case err == nil && info.IsDir():
			text = ""
		case err == nil:
			text = source(t, a)
		}
		sum.Write([]byte(text + "\x00"))
	}
	return hex.EncodeToString(sum.Sum(nil)[:16])
}

var imported = regexp.MustCompile(`(?m)^(?:import|from) (\w+)`)

// source returns the text of a file. That of a program is followed by those beside it that it imports.
func source(t testing.TB, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	all := string(text)
	if filepath.Ext(path) != ".py" {
		return all
	}
	for _, m := range imported.FindAllStringSubmatch(all, -1) {
		beside := filepath.Join(filepath.Dir(path), m[1]+".py")
		if _, err := os.Stat(beside); err == nil {
			all += source(t, beside)
		}
	}
	return all
}

var answersMutex sync.Mutex

func answersFile(t testing.TB) string {
	return filepath.Join("testdata", "answers", topLevel(t)+".json")
}

// recordings returns those of a test and of its parts, by name.
func recordings(t testing.TB) map[string]recording {
	t.Helper()
	all := map[string]recording{}
	text, err := os.ReadFile(answersFile(t))
	if os.IsNotExist(err) {
		return all
	}
	if err != nil {
		t.Fatal(err)
	}
	decode(t, text, &all)
	return all
}

func recorded(t testing.TB) recording {
	t.Helper()
	answersMutex.Lock()
	defer answersMutex.Unlock()
	return recordings(t)[t.Name()]
}

// keep writes a recording to a line of its own.
func keep(t testing.TB, r recording) {
	t.Helper()
	answersMutex.Lock()
	defer answersMutex.Unlock()
	all := recordings(t)
	all[t.Name()] = r
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		lines = append(lines, string(encode(t, name))+": "+string(encode(t, all[name])))
	}
	if err := os.MkdirAll(filepath.Dir(answersFile(t)), 0o755); err != nil {
		t.Fatal(err)
	}
	text := "{\n" + strings.Join(lines, ",\n") + "\n}\n"
	if err := os.WriteFile(answersFile(t), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
