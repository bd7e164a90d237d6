package service

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestFilesThatChangeWhileTheyAreLoaded damages a checkpoint again and again
// while it is loaded. Either nothing was overwritten, or the state does not pass
// for whole any more.
func TestFilesThatChangeWhileTheyAreLoaded(t *testing.T) {
	r := startService(t)
	s := begun(t, r.Socket, testDocument(small))
	mustStep(t, s, 2)
	directory := t.TempDir()
	if _, err := s.Save(directory, nil); err != nil {
		t.Fatal(err)
	}
	step, err := s.Saved()
	if err == nil {
		err = s.Commit(directory, step)
	}
	if err != nil {
		t.Fatal(err)
	}
	saved := fingerprint(t, s)
	mustStep(t, s, 4)
	later := fingerprint(t, s)
	files, err := filepath.Glob(filepath.Join(directory, "step-*", "*.safetensors"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%v, %v", files, err)
	}
	stop := make(chan struct{})
	var damaging sync.WaitGroup
	damaging.Go(func() { damage(t, files[0], stop) })
	outcomes := map[string]int{}
	for deadline := time.Now().Add(20 * time.Second); (outcomes["in part"] == 0 || outcomes["not at all"] == 0) && time.Now().Before(deadline); {
		_, err := s.Load(directory)
		status := r.overview(t).Sessions[0]
		var e *Error
		switch {
		case err == nil:
			outcomes["whole"]++
			if got := fingerprint(t, s); got != saved || !status.Initialized || status.Step != 2 {
				t.Fatalf("loaded, at step %d, initialized %v: %s, want %s", status.Step, status.Initialized, got, saved)
			}
			later = saved
		case !errors.As(err, &e) || e.Status != Storage:
			t.Fatal(err)
		case strings.Contains(e.Message, "loaded in part"):
			outcomes["in part"]++
			if status.Initialized {
				t.Fatalf("the state passes for whole after: %v", err)
			}
		default:
			outcomes["not at all"]++
			if got := fingerprint(t, s); status.Initialized && got != later {
				t.Fatalf("the state is %s after what was refused, and was %s: %v", got, later, err)
			}
		}
	}
	close(stop)
	damaging.Wait()
	t.Logf("%v", outcomes)
	if outcomes["in part"] == 0 || outcomes["not at all"] == 0 {
		t.Error("the damage never came between reading twice")
	}
	if _, err := s.Load(directory); err != nil {
		t.Fatal(err)
	}
	if got := fingerprint(t, s); got != saved {
		t.Errorf("in the end %s was loaded, want %s", got, saved)
	}
}

// damage changes a byte of a file, and back, until it is told to stop.
func damage(t *testing.T, name string, stop <-chan struct{}) {
	file, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Error(err)
		return
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		t.Error(err)
		return
	}
	at := info.Size() - 100
	whole := make([]byte, 1)
	if _, err := file.ReadAt(whole, at); err != nil {
		t.Error(err)
		return
	}
	for ended := false; !ended; {
		for _, b := range []byte{^whole[0], whole[0]} {
			if _, err := file.WriteAt([]byte{b}, at); err != nil {
				t.Error(err)
				return
			}
			time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
		}
		select {
		case <-stop:
			ended = true
		default:
		}
	}
}
