package main

import (
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

const parts = `
[[part]]
target = "each"
when = "always"
waits = "nothing"
proves = "little"

[[part]]
target = "slow"
when = "changed"
inputs = ["slow", "README"]
waits = "an emulator"
proves = "much"

[[part]]
target = "soak"
when = "nightly"
waits = "kills"
proves = "all"

[[note]]
name = "engine"
waits = "memory"
proves = "bits"
`

// Every target writes a line into the file "ran", and fails where the file "broken" exists.
const makefile = `.PHONY: each slow soak

each:
	@echo each >> ../ran; ! test -e ../broken

slow:
	@echo slow >> ../ran; ! test -e ../broken

soak:
	@echo soak >> ../ran; ! test -e ../broken
`

// checkout is a repository of git with parts.
type checkout struct {
	t      *testing.T
	folder string
}

func newCheckout(t *testing.T) checkout {
	for _, program := range []string{"git", "make"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skip(err)
		}
	}
	for name, value := range map[string]string{"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b",
		"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b", "GIT_CONFIG_GLOBAL": os.DevNull,
		"GIT_CONFIG_SYSTEM": os.DevNull, "MAKEFLAGS": ""} {
		t.Setenv(name, value)
	}
	c := checkout{t, filepath.Join(t.TempDir(), "tree")}
	for name, text := range map[string]string{partsFile: parts, "Makefile": makefile, "slow/a.go": "one",
		"README": "one", "other": "one", "go.mod": "one", "go.sum": "one"} {
		c.write(name, text)
	}
	c.git("init", "--quiet")
	c.commit("2026-01-01T00:00:00Z")
	return c
}

func (c checkout) write(name, text string) {
	c.t.Helper()
	name = filepath.Join(c.folder, name)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		c.t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		c.t.Fatal(err)
	}
}

func (c checkout) git(arguments ...string) {
	c.t.Helper()
	if out, err := exec.Command("git", append([]string{"-C", c.folder}, arguments...)...).CombinedOutput(); err != nil {
		c.t.Fatalf("git %v: %v\n%s", arguments, err, out)
	}
}

func (c checkout) commit(date string) {
	c.t.Helper()
	c.t.Setenv("GIT_COMMITTER_DATE", date)
	c.git("add", "--all")
	c.git("commit", "--quiet", "--allow-empty", "--message", "change")
}

func (c checkout) tree() *tree {
	c.t.Helper()
	tree, err := read(c.folder)
	if err != nil {
		c.t.Fatal(err)
	}
	return tree
}

// ran runs the parts of a change, and returns the targets that were made and the error.
func (c checkout) ran(all bool, names ...string) (string, error) {
	c.t.Helper()
	return c.after(func(t *tree) error { return runChange(c.t.Output(), t, names, all) })
}

func (c checkout) after(run func(*tree) error) (string, error) {
	c.t.Helper()
	log := filepath.Join(c.folder, "..", "ran")
	if err := os.WriteFile(log, nil, 0o644); err != nil {
		c.t.Fatal(err)
	}
	failure := run(c.tree())
	text, err := os.ReadFile(log)
	if err != nil {
		c.t.Fatal(err)
	}
	return strings.Join(strings.Fields(string(text)), " "), failure
}

// TestChangedPartsRun: a part whose inputs are those of a commit at which it passed does not run again.
func TestChangedPartsRun(t *testing.T) {
	c := newCheckout(t)
	broken := filepath.Join(c.folder, "..", "broken")
	expect := func(step, want string, all bool, fails bool) {
		t.Helper()
		if ran, err := c.ran(all); ran != want || (err != nil) != fails {
			t.Errorf("%s: %q ran, error %v, want %q, %v", step, ran, err, want, fails)
		}
	}
	expect("at first", "each slow", false, false)
	expect("unchanged", "each", false, false)
	expect("all", "each slow", true, false)
	c.write("other", "two")
	expect("another file", "each", false, false)
	c.commit("2026-01-02T00:00:00Z")
	expect("another file, committed", "each", false, false)
	c.write("slow/a.go", "two")
	expect("an input", "each slow", false, false)
	expect("an input that is not committed", "each slow", false, false) // a tree with changes has no record
	c.commit("2026-01-03T00:00:00Z")
	expect("committed", "each slow", false, false)
	expect("and unchanged", "each", false, false)
	c.write("slow/b.go", "new")
	expect("a file that git does not track", "each slow", false, false)
	c.commit("2026-01-04T00:00:00Z")
	if err := os.WriteFile(broken, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if ran, err := c.ran(false, "slow"); ran != "slow" || err == nil {
		t.Errorf("a part that fails: %q ran, error %v", ran, err)
	}
	expect("the first part fails", "each", false, true)
	if err := os.Remove(broken); err != nil {
		t.Fatal(err)
	}
	expect("after a failure", "each slow", false, false)
	c.write("Makefile", strings.ReplaceAll(makefile, "echo slow", "echo slow and"))
	c.commit("2026-01-05T00:00:00Z")
	expect("another recipe", "each slow and", false, false)
	c.write("go.mod", "two")
	c.commit("2026-01-06T00:00:00Z")
	expect("another dependency", "each slow and", false, false)
}

// TestSideBySide: parts that keep few cores busy run side by side as cores allow; the others run alone.
func TestSideBySide(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		var mutex sync.Mutex
		ended := map[string]time.Duration{}
		err := sideBySide([]part{{Target: "all"}, {Target: "one", Cores: 1}, {Target: "another", Cores: 1},
			{Target: "third", Cores: 1}, {Target: "many", Cores: 9}}, 2, func(p part) error {
			time.Sleep(map[string]time.Duration{"one": 3 * time.Hour}[p.Target] + time.Hour)
			mutex.Lock()
			defer mutex.Unlock()
			ended[p.Target] = time.Since(begin)
			return nil
		})
		want := map[string]time.Duration{"all": time.Hour, "another": 2 * time.Hour, "third": 3 * time.Hour,
			"one": 5 * time.Hour, "many": 6 * time.Hour}
		if err != nil || !maps.Equal(ended, want) {
			t.Errorf("parts ended after %v, error %v, want %v", ended, err, want)
		}
	})
}

// TestFailureEndsParts: where a part fails, none is begun after it, and what runs beside it comes to its end.
func TestFailureEndsParts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		failure := errors.New("failed")
		var mutex sync.Mutex
		var ended []string
		err := sideBySide([]part{{Target: "long", Cores: 1}, {Target: "fails", Cores: 1}, {Target: "next", Cores: 1},
			{Target: "last"}}, 2, func(p part) error {
			if p.Target == "fails" {
				time.Sleep(time.Hour)
				return failure
			}
			time.Sleep(2 * time.Hour)
			mutex.Lock()
			defer mutex.Unlock()
			ended = append(ended, p.Target)
			return nil
		})
		if !errors.Is(err, failure) || !slices.Equal(ended, []string{"long"}) {
			t.Errorf("%v ended, error %v, want long, and the failure", ended, err)
		}
	})
}

// TestOutputOfParts: each line of a part stands behind its name, however it was written.
func TestOutputOfParts(t *testing.T) {
	var out strings.Builder
	lines := &prefixed{prefix: "lint: ", out: &out, turn: &sync.Mutex{}}
	for _, text := range []string{"one\ntw", "o\n", "", "three"} {
		if n, err := lines.Write([]byte(text)); n != len(text) || err != nil {
			t.Errorf("%q: wrote %d, error %v", text, n, err)
		}
	}
	lines.end()
	lines.end()
	if want := "lint: one\nlint: two\nlint: three\n"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
}

// TestUnknownCommitDoesNotHold: nobody can compare with a commit that the clone lacks.
func TestUnknownCommitDoesNotHold(t *testing.T) {
	c := newCheckout(t)
	c.write(recordFile, "part\tresult\tseconds\tcpu_seconds\tdate\tcommit\n"+
		"slow\tpassed\t1\t1\t2026-01-01\t0123456789ab\n")
	if ran, err := c.ran(false, "slow"); ran != "slow" || err != nil {
		t.Errorf("%q ran, error %v", ran, err)
	}
}

func TestNightly(t *testing.T) {
	c := newCheckout(t)
	status := func() string {
		var text strings.Builder
		printStatus(&text, c.tree())
		return text.String()
	}
	const warning = "WARNING: these parts did not pass within the last week of commits: soak"
	if s := status(); !strings.Contains(s, "never ran") || !strings.Contains(s, warning) {
		t.Errorf("before the first night: %s", s)
	}
	night := func(t *tree) error { return runNight(c.t.Output(), t, nil) }
	if ran, err := c.after(night); ran != "soak" || err != nil {
		t.Errorf("%q ran, error %v", ran, err)
	}
	c.commit("2026-01-08T00:00:00Z")
	if s := status(); strings.Contains(s, "WARNING") || !strings.Contains(s, "passed") {
		t.Errorf("after a night: %s", s)
	}
	c.commit("2026-01-08T00:00:01Z")
	if s := status(); !strings.Contains(s, warning) {
		t.Errorf("more than a week after: %s", s)
	}
	c.write("../broken", "")
	if ran, err := c.after(night); ran != "soak" || err == nil {
		t.Errorf("a night that fails: %q ran, error %v", ran, err)
	}
	if s := status(); !strings.Contains(s, "failed") || !strings.Contains(s, warning) {
		t.Errorf("after a night that failed: %s", s)
	}
}

func TestBadParts(t *testing.T) {
	for name, c := range map[string]struct{ old, replacement, want string }{
		"a time":           {`"nightly"`, `"sometimes"`, `when is "sometimes", expected always, changed or nightly`},
		"no inputs":        {`inputs = ["slow", "README"]`, "", "have inputs"},
		"an input is gone": {`"README"`, `"GONE"`, "GONE: no such file"},
		"no reason":        {`proves = "all"`, "", "what it proves"},
		"an unknown key":   {`waits = "kills"`, `wait = "kills"`, "strict mode"},
	} {
		checkout := newCheckout(t)
		checkout.write(partsFile, strings.Replace(parts, c.old, c.replacement, 1))
		if _, err := read(checkout.folder); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", name, err, c.want)
		}
	}
}

// TestPartsOfTheProject: every part is a target of make.
func TestPartsOfTheProject(t *testing.T) {
	tree, err := read(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join("..", "..", "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range tree.parts {
		if recipe(string(text), p.Target) == "" {
			t.Errorf("the Makefile has no target %s", p.Target)
		}
	}
	if len(tree.parts) < 10 {
		t.Errorf("only %d parts were read", len(tree.parts))
	}
}

func TestTable(t *testing.T) {
	got, err := replaceTable("before\n"+tableBegin+"old\n"+tableEnd+"after\n",
		table([]row{{"lint (always)", 60, 90, "compiling", "format"}},
			[]row{{"fast", 6, 0, "little", "nothing"}, {"slow", 7.6, 3, "sleep", "something"}}))
	want := "before\n" + tableBegin + `
| part | seconds | of CPU | what they are spent on | what nothing else shows |
|---|---|---|---|---|
| lint (always) | 60 | 90 | compiling | format |

| package or file | seconds | of CPU | what they are spent on | what nothing else shows |
|---|---|---|---|---|
| slow | 8 | 3 | sleep | something |
| fast | 6 | - | little | nothing |

` + tableEnd + "after\n"
	if err != nil || got != want {
		t.Errorf("error %v, %s\nwant %s", err, got, want)
	}
	if _, err := replaceTable("no marks", ""); err == nil {
		t.Error("a text without a place for the table was accepted")
	}
}

func TestSecondsOfModules(t *testing.T) {
	got, err := secondsOfModules([]byte(`<testsuites><testsuite><testcase classname="python.tests.test_a" name="x" time="1.5"/>
		<testcase classname="python.tests.test_a" name="y" time="2"/><testcase classname="python.tests.test_b" name="z"
		time="0.25"/></testsuite></testsuites>`))
	if err != nil || len(got) != 2 || got["python/tests/test_a.py"] != 3.5 || got["python/tests/test_b.py"] != 0.25 {
		t.Errorf("%v, error %v", got, err)
	}
}

func TestNoted(t *testing.T) {
	tree := newCheckout(t).tree()
	if r, slow := tree.noted("engine", 6, 5); !slow || r.waits != "memory" || r.proves != "bits" {
		t.Errorf("%+v, %v", r, slow)
	}
	if _, slow := tree.noted("engine", 5, 5); slow {
		t.Error("five seconds are not slow")
	}
}
