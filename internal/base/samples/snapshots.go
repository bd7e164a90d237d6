package samples

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// SnapshotsVariable names, to the ranks, the recording beside which they write memory snapshots of PyTorch. The client
// writes one when PyTorch finds no memory on a GPU.
const SnapshotsVariable = "PLIMSOLL_SNAPSHOTS"

// RankSnapshot is a memory snapshot that a rank has written beside a recording.
type RankSnapshot struct {
	Path    string
	Rank    int
	Written time.Time
}

// SnapshotsOf returns the snapshots beside a recording: for run.jsonl run.jsonl.rank0.pickle and so on.
func SnapshotsOf(recording string) (list []RankSnapshot) {
	folder, prefix := filepath.Dir(recording), filepath.Base(recording)+".rank"
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		number, found := strings.CutPrefix(e.Name(), prefix)
		number, isPickle := strings.CutSuffix(number, ".pickle")
		rank, err := strconv.Atoi(number)
		if !found || !isPickle || err != nil {
			continue
		}
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() {
			list = append(list, RankSnapshot{filepath.Join(folder, e.Name()), rank, info.ModTime()})
		}
	}
	return list
}
