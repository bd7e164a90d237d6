//go:build linux

package checkpoint

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
)

// TestFilesKeepTheirBytes: a release writes the bytes of the releases before it. Shares of one shard may come from
// ranks of different releases, and their manifests are compared.
func TestFilesKeepTheirBytes(t *testing.T) {
	for name, test := range map[string]struct {
		format kernel.Format
		want   string
	}{
		"split": {shardtest.SplitFormat, "22204c74507869326876b5a0b2bc8052"},
		"fp32": {shardtest.Format(kernel.Lion, kernel.FP32, kernel.MomentsBF16, dtype.F16),
			"7dbd36a5c3e422b918fb3139b59e4741"},
		"int8": {shardtest.Format(kernel.Adam, kernel.FP32, kernel.MomentsInt8, dtype.BF16),
			"e9d3eba410eea4bc5156e48fa0b0c239"},
	} {
		t.Run(name, func(t *testing.T) {
			directory := t.TempDir()
			job := replicate(t, test.format,
				shardtest.CutModel(shardtest.SmallModel, shardtest.Mixed(test.format.Moments), 5000, 15000), 2)
			for i := range job {
				job[i].Identity = "golden"
				saving, err := Save(directory, job[i], jsontext.Value(fmt.Sprintf(`{"rank":%d}`, job[i].Rank)))
				if err != nil {
					t.Fatal(err)
				}
				if err := saving.Wait(); err != nil {
					t.Fatal(err)
				}
			}
			path, err := Commit(directory, 3, "golden")
			if err != nil {
				t.Fatal(err)
			}
			if got := digest(t, path); got != test.want {
				t.Errorf("the files have the digest %s, want %s", got, test.want)
			}
		})
	}
}

// digest hashes the names and bytes of all files of a folder.
func digest(t *testing.T, folder string) string {
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	h := sha256.New()
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(folder, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(h, "%s %d\n", e.Name(), len(text))
		h.Write(text)
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:16])
}
