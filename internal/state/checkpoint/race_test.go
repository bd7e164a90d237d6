//go:build linux

package checkpoint

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
)

// TestSaveBesideACommit: one job saves and commits a step again and again. Another begins
// to save it in the same folder all the time. Every commit is complete, and a save that is
// not refused succeeds.
func TestSaveBesideACommit(t *testing.T) {
	wanted := 30
	if testing.Short() {
		wanted = 5
	}
	for name, replaces := range map[string]bool{"the first of its step": false, "in place of another": true} {
		t.Run(name, func(t *testing.T) {
			directory := t.TempDir()
			cuts := shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32))
			one, other := newJob(t, shardtest.SplitFormat, 700, cuts), newJob(t, shardtest.SplitFormat, 700, cuts)
			train(t, one, 1, 1)
			train(t, other, 2, 1)
			other[0].Identity = "other"
			saves := func(s Shard) bool {
				saving, err := Save(directory, s, nil)
				if err == nil {
					err = saving.Wait()
				}
				if err != nil && !strings.Contains(err.Error(), "another job is saving the same step") {
					t.Error(err)
				}
				return err == nil
			}
			committed := 0
			var enough atomic.Bool
			var ended sync.WaitGroup
			turns := make(chan struct{})
			ended.Go(func() {
				for !enough.Load() && !t.Failed() {
					saves(other[0])
					select {
					case turns <- struct{}{}:
					default: // nobody waits for it
					}
				}
				close(turns)
			})
			for began := time.Now(); committed < wanted && !t.Failed() && time.Since(began) < 3*time.Minute; {
				one[0].Identity = fmt.Sprint("one", committed)
				if !saves(one[0]) {
					continue
				}
				path, err := Commit(directory, 1, one[0].Identity)
				if err != nil {
					continue // the other has written its file since
				}
				committed++
				for range 2 { // then the other has saved from beginning to end
					<-turns
				}
				c, err := Open(path)
				if err == nil {
					err = c.Verify(t.Context(), nil)
				}
				if err == nil && !replaces {
					err = os.RemoveAll(path)
				}
				if err != nil {
					t.Errorf("commit %d: %v", committed, err)
				}
			}
			enough.Store(true)
			ended.Wait()
			if committed < wanted && !t.Failed() {
				t.Errorf("%d commits: expected %d", committed, wanted)
			}
		})
	}
}
