package main

import (
	"encoding/json"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/show/report"
	"plimsoll/internal/state/optim/kernel"
)

func TestVersionOf(t *testing.T) {
	commit := []debug.BuildSetting{{Key: "vcs.revision", Value: "0123abc"}}
	for _, c := range []struct {
		release, module string
		settings        []debug.BuildSetting
		want            string
	}{
		{"v1.2.3", "v0.0.0-20261123-0123abc", commit, "1.2.3"},
		{"", "v0.0.0-20261123-0123abc", commit, "0.0.0-20261123-0123abc"},
		{"", "(devel)", commit, "0123abc"},
		{"", "(devel)", nil, "unknown"},
		{"", "", nil, "unknown"},
	} {
		info := &debug.BuildInfo{Main: debug.Module{Version: c.module}, Settings: c.settings}
		if got := versionOf(c.release, info); got != c.want {
			t.Errorf("release %q, module %q, %v: %q, want %q", c.release, c.module, c.settings, got, c.want)
		}
	}
}

func TestVersion(t *testing.T) {
	stdout, stderr, code := runs("version", "--json")
	var d report.Build
	if err := json.Unmarshal([]byte(stdout), &d); err != nil || code != exitDone || stderr != "" {
		t.Fatalf("exit code %d, %v: %s%s", code, err, stdout, stderr)
	}
	sets := kernel.Available()
	if d.Go != runtime.Version() || d.Platform != runtime.GOOS+"/"+runtime.GOARCH ||
		!slices.ContainsFunc(sets, func(s kernel.Set) bool { return s.String() == d.Kernel }) {
		t.Errorf("%+v", d)
	}
	if d.Version == "" || strings.Contains(d.Version, development) {
		t.Errorf("the version is %q", d.Version)
	}
	text, _, _ := runs("version")
	for _, want := range []string{d.Version, d.Go, d.Platform, d.Kernel} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in:\n%s", want, text)
		}
	}
}
