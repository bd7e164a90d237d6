//go:build linux

package protocol

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzPipes reads packets of any bytes from a pipe. What is read is what was written behind the head, and a packet that
// ends in the middle is the end of the connection.
func FuzzPipes(f *testing.F) {
	f.Add(append(Encode(head{3, 0}), 1, 2, 3))
	f.Add(append(Encode(head{3, 0}), 1, 2)) // the sender has died
	f.Add(Encode(head{0, 0}))
	f.Add(Encode(head{MaximumPacket + 1, 0}))
	f.Add(Encode(head{0, MaximumFiles + 1}))
	f.Add(append(Encode(head{1, 1}), append(Encode(sentFile{0, 1, 2}), 7)...)) // of no process
	f.Fuzz(func(t *testing.T, written []byte) {
		if len(written) > 1<<12 { // a pipe takes more without a reader
			return
		}
		in, out, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := out.Write(written); err != nil {
			t.Fatal(err)
		}
		_ = out.Close()
		p := &Pipes{in: in}
		defer in.Close()
		size := len(Encode(head{}))
		for at := 0; ; {
			packet, files, err := p.read(make([]byte, MaximumPacket))
			if len(files) > 0 {
				t.Fatalf("%d files of no process", len(files))
			}
			if err != nil {
				var answer *Error
				if !errors.Is(err, io.EOF) && (!errors.As(err, &answer) || answer.Status != Malformed) {
					t.Fatal(err)
				}
				return
			}
			if at += size; !bytes.Equal(packet, written[at:at+len(packet)]) {
				t.Fatalf("read %x, written %x", packet, written)
			}
			at += len(packet)
		}
	})
}

// TestOnlyTheFileThatWasSent: a descriptor of the sender that is of another file by now is not taken for it.
func TestOnlyTheFileThatWasSent(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "sent"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var stat unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &stat); err != nil {
		t.Fatal(err)
	}
	p := &Pipes{process: os.Getpid()}
	same, err := p.open(sentFile{uint64(file.Fd()), stat.Dev, stat.Ino})
	if err != nil {
		t.Fatal(err)
	}
	_ = same.Close()
	for _, other := range []sentFile{{uint64(file.Fd()), stat.Dev, stat.Ino + 1},
		{uint64(file.Fd()), stat.Dev + 1, stat.Ino}} {
		if taken, err := p.open(other); err == nil {
			_ = taken.Close()
			t.Errorf("%+v is taken for the file of inode %d on device %d", other, stat.Ino, stat.Dev)
		}
	}
}
