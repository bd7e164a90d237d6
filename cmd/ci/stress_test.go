package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestStressIsRecorded: runs of all packages add up in a file, with what failed. Those of some packages are not there.
func TestStressIsRecorded(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	record := filepath.Join(folder, "stress.tsv")
	passes, fails := fakeGo(t, folder, "passes", "exit 0"), fakeGo(t, folder, "fails", `case "$*" in *-count=1*)
	printf -- '--- FAIL: TestOther (0.01s)\n    --- FAIL: TestOther/busy (0.01s)\nFAIL\nFAIL\tplimsoll/internal/x\t1s\n'
	exit 1 ;;
esac`)

	for _, c := range []struct {
		tool, says string
		arguments  []string
		fails      bool
	}{
		{passes, "0 of 2 runs failed; 2 of the runs", []string{"2"}, false},
		{passes, "0 of 1 runs failed; 2 of the runs", []string{"1", "./internal/base/version"}, false},
		{fails, "1 of 1 runs failed; 2 of the runs", []string{"1"}, true},
	} {
		command := exec.Command("../../scripts/stress", c.arguments...)
		command.Env = append(os.Environ(), "GO="+c.tool, "STRESS_RECORD="+record, "STRESS_FREE_MIB=1000000000")
		out, err := command.CombinedOutput()
		if c.fails != (err != nil) || !strings.Contains(string(out), c.says) {
			t.Errorf("%v: %v, expected %q in\n%s", c.arguments, err, c.says, out)
		}
	}
	got, err := os.ReadFile(record)
	if err != nil {
		t.Fatal(err)
	}
	want := regexp.MustCompile(`^result\tseconds\tdate\tcommit\tfailed\n` +
		`(?:passed\t\d+\t\d{4}-\d\d-\d\d\t(?:changed since )?[0-9a-f]{12}\t\n){2}` +
		`failed\t\d+\t\S+\t[^\t]+\tTestOther TestOther/busy plimsoll/internal/x\n$`)
	if !want.Match(got) {
		t.Errorf("recorded\n%s", got)
	}
}

// fakeGo makes a program that stands in for go.
func fakeGo(t *testing.T, folder, name, does string) string {
	t.Helper()
	path := filepath.Join(folder, name)
	if err := os.WriteFile(path, []byte("#!/usr/bin/env bash\n"+does+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}
