package torchtest

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
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

// failing is a test that may fail. It keeps what it says.
type failing struct {
	testing.TB
	failed, logged string
}

func (f *failing) Logf(format string, values ...any)   { f.logged += fmt.Sprintf(format, values...) }
func (f *failing) Errorf(format string, values ...any) { f.failed += fmt.Sprintf(format, values...) }

func (f *failing) Fatalf(format string, values ...any) {
	f.Errorf(format, values...)
	runtime.Goexit()
}

func (f *failing) Fatal(values ...any) { f.Fatalf("%s", fmt.Sprintln(values...)) }

// answer returns that of a program, or 0 where the test fails at once.
func (f *failing) answer(ask Asker, exact bool, program string) (result int) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		result = answer[int](f, ask, exact, []string{"-c", program})
	}()
	<-done
	return result
}

// TestAnswers holds answers of Python against a recording of 1.
func TestAnswers(t *testing.T) {
	const program = "print(1)"
	Python(t)
	now, other := versions(t), map[string]string{"torch": "0"}
	for name, test := range map[string]struct {
		short           bool
		versions        map[string]string
		asked           string // another program has another question
		says            string // by Python, or nothing where it must not be asked
		measured        bool
		want            int
		failure, logged string
	}{
		"the same":             {versions: now, asked: program, says: "1", want: 1},
		"the same, after more": {versions: now, asked: program, says: "a warning\n1\n", want: 1},
		"another": {versions: now, asked: program, says: "2", want: 2,
			failure: "Python answers 2, recorded is 1: record anew: go test -run '^TestAnswers$' -record"},
		"another of what is measured": {versions: now, asked: program, says: "2", measured: true, want: 2},
		"another of other versions":   {versions: other, asked: program, says: "2", want: 2, logged: "of map[torch:0]"},
		"no number":                   {versions: now, asked: program, says: "none", failure: "invalid character"},
		"a failure":                   {versions: now, asked: program, says: "fails", failure: "of the program"},
		"another question":            {versions: now, asked: "print(2)", failure: "has no answer to this program"},
		"-short": {short: true, versions: now, asked: program, want: 1,
			logged: "Python is not asked"},
		"another question, -short": {short: true, versions: now, asked: "print(2)", failure: "has no answer"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			setShort(t, test.short)
			keep(t, recording{hashOf(t, []string{"-c", program}), test.versions, []byte("1")})
			f := &failing{TB: t}
			got := f.answer(func(testing.TB, ...string) ([]byte, error) {
				if test.says == "" {
					t.Error("Python is asked")
				}
				if test.says == "fails" {
					return nil, errors.New("of the program")
				}
				return []byte(test.says), nil
			}, !test.measured, test.asked)
			if got != test.want || !says(f.failed, test.failure) || !says(f.logged, test.logged) {
				t.Errorf("%d, fails with %q, logs %q", got, f.failed, f.logged)
			}
		})
	}
}

// says is whether a text has a part, or both are empty.
func says(text, part string) bool {
	return (text == "") == (part == "") && strings.Contains(text, part)
}

// setShort runs the rest of a test with -short, or without it.
func setShort(t *testing.T, short bool) {
	t.Helper()
	before := testing.Short()
	set := func(short bool) {
		if err := flag.Set("test.short", fmt.Sprint(short)); err != nil {
			t.Fatal(err)
		}
	}
	set(short)
	t.Cleanup(func() { set(before) })
}
