//go:build linux

package checkpoint

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"plimsoll/internal/base/ledger"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// benchmarked returns a shard of 768 MiB and a folder on the disk of TMPDIR. The shard has
// two workers if there are two CPUs.
func benchmarked(b *testing.B) (s Shard, bytes int64, directory string) {
	b.Helper()
	const parameters = 64 << 20
	return stepped(b, parameters, min(2, runtime.NumCPU())), 12 * parameters, b.TempDir()
}

// BenchmarkSave alternates saves with plain writes of the same bytes: large ones, one
// after the other, and an fdatasync at the end. The result is the median of the ratios.
func BenchmarkSave(b *testing.B) {
	s, bytes, directory := benchmarked(b)
	b.SetBytes(bytes)
	compare(b, func() error {
		saving, err := Save(directory, s, nil)
		if err != nil {
			return err
		}
		if err := saving.Wait(); err != nil {
			return err
		}
		_, err = Commit(directory, saving.Step(), "")
		return err
	}, func() error { return writePlainly(filepath.Join(directory, "plain"), s) }, func() {
		os.RemoveAll(filepath.Join(directory, folderOf(s.State.Steps())))
		os.Remove(filepath.Join(directory, "plain"))
		settle(b, directory)
	})
}

// settle brings the disk to rest.
func settle(b *testing.B, directory string) {
	folder, err := os.Open(directory)
	if err != nil {
		b.Fatal(err)
	}
	defer folder.Close()
	if err := unix.Syncfs(int(folder.Fd())); err != nil {
		b.Fatal(err)
	}
}

// writePlainly writes the same bytes as a save.
func writePlainly(path string, s Shard) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	for _, component := range []ledger.Component{ledger.ExpAvg, ledger.ExpAvgSq, ledger.Parameters,
		ledger.MasterWeightsLow} {
		for chunk := range slices.Chunk(s.State.Arena(component).Bytes(), 8<<20) {
			if _, err := file.Write(chunk); err != nil {
				return err
			}
		}
	}
	return errors.Join(unix.Fdatasync(int(file.Fd())), file.Close())
}

// BenchmarkLoad alternates loads into a shard whose state is worth keeping with plain
// reads of the file. Such a load reads everything twice. The page cache is emptied before
// each.
func BenchmarkLoad(b *testing.B) {
	benchmarkReading(b, func(c *Checkpoint, s Shard) error {
		_, _, err := c.Load(b.Context(), s)
		return err
	})
}

// BenchmarkLoadNew measures loads that read everything once.
func BenchmarkLoadNew(b *testing.B) {
	benchmarkReading(b, func(c *Checkpoint, s Shard) error {
		_, _, err := c.LoadNew(b.Context(), s)
		return err
	})
}

// BenchmarkVerify measures a verification, which reads everything once.
func BenchmarkVerify(b *testing.B) {
	benchmarkReading(b, func(c *Checkpoint, _ Shard) error { return c.Verify(b.Context(), nil) })
}

func benchmarkReading(b *testing.B, read func(*Checkpoint, Shard) error) {
	s, bytes, directory := benchmarked(b)
	path := save(b, directory, []Shard{s}, "")
	b.SetBytes(bytes)
	compare(b, func() error {
		c, err := Open(path)
		if err == nil {
			err = read(c, s)
		}
		return err
	}, func() error { return readPlainly(dataOf(path, s)) }, func() { emptyCache(b, dataOf(path, s)) })
}

func dataOf(path string, s Shard) string {
	return filepath.Join(path, fileName(s.Rank, s.World, s.Part)+dataSuffix)
}

func readPlainly(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{file}, make([]byte, 8<<20))
	return err
}

func emptyCache(b *testing.B, path string) {
	file, err := os.Open(path)
	if err != nil {
		b.Fatal(err)
	}
	defer file.Close()
	if err := unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		b.Fatal(err)
	}
}

// compare reports the median of how much longer the plain way takes: 1 is the
// speed of the disk.
func compare(b *testing.B, ours, plain func() error, prepare func()) {
	var ratios []float64
	measured := func(do func() error) float64 {
		prepare()
		begin := time.Now()
		if err := do(); err != nil {
			b.Fatal(err)
		}
		return time.Since(begin).Seconds()
	}
	for b.Loop() {
		ratios = append(ratios, measured(plain)/measured(ours))
		prepare()
	}
	slices.Sort(ratios)
	b.ReportMetric(ratios[len(ratios)/2], "of-disk")
	b.Logf("ratios %.2f", ratios)
}
