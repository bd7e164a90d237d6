//go:build linux

package checkpoint

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// BenchmarkStepWhileSaving alternates steps while nothing is saved, the steps after a
// save has begun, and plain writes of the same bytes by as many threads.
//
// The results are medians of ratios: how much longer the first step takes, over the time
// of a plain copy of the bytes that were written meanwhile. The copy goes into the page
// cache, alone and while it is being written back, and to the disk.
func BenchmarkStepWhileSaving(b *testing.B) {
	for _, parameters := range []int64{64 << 20, 256 << 20} {
		for _, workers := range []int{1, 2} {
			b.Run(fmt.Sprintf("%dMi/workers=%d", parameters>>20, workers), func(b *testing.B) {
				benchmarkStepWhileSaving(b, stepped(b, parameters, workers),
					func(directory string, s Shard) (*writer, *Saving) {
						saving, err := Save(directory, s, nil)
						if err != nil {
							b.Fatal(err)
						}
						return nil, saving
					})
			})
		}
	}
}

// BenchmarkStepWhileSavingSlowly is BenchmarkStepWhileSaving with a disk that writes
// 100 MB/s. Saves are given up after the steps.
func BenchmarkStepWhileSavingSlowly(b *testing.B) {
	for _, workers := range []int{1, 2} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			benchmarkStepWhileSaving(b, stepped(b, 64<<20, workers),
				func(directory string, s Shard) (*writer, *Saving) {
					measureSpare()
					w := newTestWriter(b, directory, s)
					writeBackTo(b, w, &slowDisk{fileOnDisk{w.file}}, window, pageCache)
					return w, w.save(s.State)
				})
		})
	}
}

type slowDisk struct{ fileOnDisk }

func (d *slowDisk) start(int64, int64) error { return nil }

func (d *slowDisk) finish(offset, bytes int64, forget bool) error {
	time.Sleep(time.Duration(bytes) * time.Second / 100e6)
	return d.fileOnDisk.finish(offset, bytes, forget)
}

// stepped returns a shard with the fastest kernel and each worker on its own CPU.
func stepped(b *testing.B, parameters int64, workers int) Shard {
	kernels, err := kernel.Select()
	if err != nil {
		b.Fatal(err)
	}
	h, err := host.Local()
	if err != nil {
		b.Fatal(err)
	}
	cpus := h.CPUs.List()
	if len(cpus) < workers {
		b.Skipf("%d CPUs", len(cpus))
	}
	pieces := []shard.Piece{{Name: "mlp.weight", Shape: []int64{parameters}, Range: shard.Range{Count: parameters}}}
	l, err := layoutOfPieces(shardtest.SplitFormat, pieces)
	if err != nil {
		b.Fatal(err)
	}
	state, err := engine.NewShard(engine.ShardConfig{Layout: l.Layout, Kernel: kernels, CPUs: cpus[:workers]})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { state.Close() })
	s := Shard{World: 1, Part: "bf16", Format: shardtest.SplitFormat, Pieces: pieces, State: state}
	begin(b, s, 1)
	s.State.Wait()
	return s
}

// benchmarkStepWhileSaving measures with saves that save begins. If save returns a
// writer, it is given up after the steps.
func benchmarkStepWhileSaving(b *testing.B, s Shard, save func(directory string, s Shard) (*writer, *Saving)) {
	directory := b.TempDir()
	bytes := 12 * s.State.Config().Elements
	b.SetBytes(bytes)
	var results [][]float64
	for b.Loop() {
		settle(b, directory)
		copied, written := writeByThreads(b, filepath.Join(directory, "plain"), s, false)
		settle(b, directory)
		beside, _ := writeByThreads(b, filepath.Join(directory, "plain"), s, true)
		settle(b, directory)
		var alone []float64
		for range 5 {
			alone = append(alone, timedStep(b, s))
		}
		step := median(alone)
		w, saving := save(directory, s)
		before, began := bytesWritten(b), time.Now()
		first := timedStep(b, s)
		moved := float64(bytesWritten(b) - before)
		second, third := timedStep(b, s), timedStep(b, s)
		if w != nil {
			w.back.fail(errDiscarded)
		}
		if err := saving.Wait(); err != nil && w == nil {
			b.Fatal(err)
		}
		took := time.Since(began).Seconds()
		discardSaving(b, directory)
		extra, rate := (first-step)*float64(bytes)/moved,
			func(seconds float64) float64 { return float64(bytes) / 1e9 / seconds }
		results = append(results, []float64{
			extra / copied, extra / beside, extra / written, second / step, third / step,
			step, first, moved / 1e9, rate(copied), rate(beside), rate(written), rate(took),
		})
	}
	for i, name := range []string{"of-copy", "of-copy-beside", "of-disk", "second", "third", "step-s", "first-s",
		"moved-GB", "copy-GB/s", "copy-beside-GB/s", "disk-GB/s", "save-GB/s"} {
		var values []float64
		for _, r := range results {
			values = append(values, r[i])
		}
		b.ReportMetric(median(values), name)
		b.Logf("%s %.3f", name, values)
	}
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

func timedStep(b *testing.B, s Shard) float64 {
	began := time.Now()
	if err := s.State.Begin(s.State.Steps()+1, 1,
		[]optim.Optimizer{shardtest.OptimizerOf(s.Format.Algorithm)}); err != nil {
		b.Fatal(err)
	}
	s.State.Wait()
	return time.Since(began).Seconds()
}

// bytesWritten returns how many bytes this process has written so far.
func bytesWritten(b *testing.B) (n int64) {
	text, err := os.ReadFile("/proc/self/io")
	if err != nil {
		b.Skip(err)
	}
	_, count, _ := bytes.Cut(text, []byte("wchar: "))
	if _, err := fmt.Sscan(string(count), &n); err != nil {
		b.Fatal(err)
	}
	return n
}

// writeByThreads writes the bytes of a save, and perhaps writes them back meanwhile. A
// thread on each worker's CPU writes that worker's part, in pieces of the size of a
// chunk's. It returns how long that took, and how long until all was on the disk.
func writeByThreads(b *testing.B, path string, s Shard, back bool) (copied, written float64) {
	file, err := os.Create(path)
	if err != nil {
		b.Fatal(err)
	}
	defer os.Remove(path)
	if err := unix.Fallocate(int(file.Fd()), 0, 0, 12*s.State.Config().Elements); err != nil {
		b.Fatal(err)
	}
	cpus := s.State.Config().CPUs
	began := time.Now()
	var threads, beside sync.WaitGroup
	var done atomic.Bool
	if back {
		beside.Go(func() {
			for ; !done.Load(); time.Sleep(time.Millisecond) {
				if err := unix.SyncFileRange(int(file.Fd()), 0, 0, unix.SYNC_FILE_RANGE_WRITE); err != nil {
					b.Error(err)
				}
			}
		})
	}
	for number, cpu := range cpus {
		threads.Go(func() {
			runtime.LockOSThread() // and the thread ends with its mask
			mask := unix.NewCPUSet(cpu + 1)
			mask.Set(cpu)
			if err := unix.SchedSetaffinityDynamic(0, mask); err != nil {
				b.Error(err)
			}
			at := 0
			for _, component := range []ledger.Component{ledger.ExpAvg, ledger.ExpAvgSq, ledger.Parameters,
				ledger.MasterWeightsLow} {
				all := s.State.Arena(component).Bytes()
				size := len(all) / int(s.State.Config().Elements) * shard.DefaultChunk
				for from := number * len(all) / len(cpus); from < (number+1)*len(all)/len(cpus); from += size {
					if _, err := file.WriteAt(all[from:from+size], int64(at+from)); err != nil {
						b.Error(err)
					}
				}
				at += len(all)
			}
		})
	}
	threads.Wait()
	copied = time.Since(began).Seconds()
	done.Store(true)
	beside.Wait()
	if err := errors.Join(unix.Fdatasync(int(file.Fd())), file.Close()); err != nil {
		b.Fatal(err)
	}
	return copied, time.Since(began).Seconds()
}

// discardSaving removes saved files that are no checkpoint.
func discardSaving(b *testing.B, directory string) {
	folders, err := filepath.Glob(filepath.Join(directory, SavingPrefix+"*"))
	if err != nil {
		b.Fatal(err)
	}
	for _, folder := range folders {
		if err := os.RemoveAll(folder); err != nil {
			b.Fatal(err)
		}
	}
}
