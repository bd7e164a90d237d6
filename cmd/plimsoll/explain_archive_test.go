//go:build linux

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// writeBundle writes the archive of a bug report.
func writeBundle(t *testing.T, to string, files map[string]string) {
	t.Helper()
	write(t, to, func(w io.Writer) {
		zipped := gzip.NewWriter(w)
		archive := tar.NewWriter(zipped)
		for name, text := range files {
			header := &tar.Header{Name: name, Mode: 0o644, Size: int64(len(text)), Typeflag: tar.TypeReg}
			if err := archive.WriteHeader(header); err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(archive, text); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(archive.Close(), zipped.Close()); err != nil {
			t.Fatal(err)
		}
	})
}

// TestExplainReadsArchives: logs, recordings and counters of a bug report's archive are evidence, what takes a file of
// its own is named, and nothing is written.
func TestExplainReadsArchives(t *testing.T) {
	folder := t.TempDir()
	bundle := filepath.Join(folder, "bundle.tar.gz")
	recording, err := os.ReadFile(exampleRecording)
	if err != nil {
		t.Fatal(err)
	}
	writeBundle(t, bundle, map[string]string{
		"../dmesg.txt": "[  7.1] Out of memory: Killed process 7 (python) total-vm:9kB, anon-rss:6kB, file-rss:8kB, " +
			"shmem-rss:0kB, UID:1000 pgtables:14kB oom_score_adj:0\n",
		"run.jsonl":      string(recording),
		"ds_config.json": `{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}`,
	})
	out, _ := exec.Command(program(t), "explain", "--json", bundle).CombinedOutput()
	for _, expected := range []string{
		bundle + "/dmesg.txt", bundle + "/run.jsonl", bundle + "/ds_config.json: left out",
		`"kernel log"`, `"recording"`,
	} {
		if !strings.Contains(string(out), expected) {
			t.Errorf("%s\nlacks %s", out, expected)
		}
	}
	if files, err := os.ReadDir(folder); err != nil || len(files) != 1 {
		t.Errorf("%v, %v: expected the archive alone", files, err)
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(folder), "dmesg.txt")); err == nil {
		t.Error("a file was written")
	}
}

// TestExplainRefusesArchives: an archive that shows nothing is bad input, and so is a zip without its end.
func TestExplainRefusesArchives(t *testing.T) {
	bundle := filepath.Join(t.TempDir(), "bundle.tar.gz")
	writeBundle(t, bundle, map[string]string{"empty.log": ""})
	for name, test := range map[string]struct {
		argument string
		stdin    string
		says     string
	}{
		"nothing in it":     {bundle, "", "no file with content"},
		"a zip on a stream": {"-", "PK\x05\x06" + strings.Repeat("\x00", 18), "list of its files is at its end"},
	} {
		command := exec.Command(program(t), "explain", test.argument)
		command.Stdin = bytes.NewReader([]byte(test.stdin))
		out, _ := command.CombinedOutput()
		if code := command.ProcessState.ExitCode(); code != exitInput || !strings.Contains(string(out), test.says) {
			t.Errorf("%s: exit code %d, %s: expected %q", name, code, out, test.says)
		}
	}
}
