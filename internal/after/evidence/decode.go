package evidence

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"compress/gzip"
	"errors"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/mikelolasagasti/xz"
	"golang.org/x/text/encoding"
	"golang.org/x/text/encoding/unicode"
	"golang.org/x/text/encoding/unicode/utf32"

	"plimsoll/internal/base/fault"
)

const (
	// headSize is how many bytes the reader looks at before it decides what a file is.
	headSize = 64 << 10
	// longestText is the limit of a decompressed text, and of all texts of an archive. A small file can claim any size.
	longestText = 1 << 30
	// deepestCompression is how often a file may be compressed.
	deepestCompression = 3
	// largestWindow bounds the memory of zstd and xz: how far back a compressed text may refer. xz -9 takes 64 MiB.
	largestWindow = 128 << 20
)

// compressions are the formats of compressed files, by their first bytes.
var compressions = []struct {
	magic string
	open  func(io.Reader) (io.Reader, error)
}{
	{"\x1f\x8b\x08", func(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) }},
	{"BZh", func(r io.Reader) (io.Reader, error) { return bzip2.NewReader(r), nil }},
	{"\x28\xb5\x2f\xfd", func(r io.Reader) (io.Reader, error) {
		return zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(largestWindow))
	}},
	{"\xfd7zXZ\x00", func(r io.Reader) (io.Reader, error) { return xz.NewReader(r, largestWindow) }},
}

// Text is the text of a file: decompressed, and in UTF-8 where it was UTF-16. Bytes that are no UTF-8 stay.
type Text struct {
	*bufio.Reader
	Archive Archive // what the file is instead, if it has files of its own
	source  *Source
	limit   *limit
}

// Name returns the name for findings and errors.
func (t *Text) Name() string { return t.source.Name }

// Open opens a file. Its name is for findings and errors.
func Open(name string, from io.Reader) (*Text, error) {
	t := &Text{source: &Source{Name: name},
		limit: &limit{left: longestText, hint: "give the end of the log: zcat FILE | tail -n 1000000"}}
	return t, t.open(from)
}

func (t *Text) open(from io.Reader) error {
	t.Reader = bufio.NewReaderSize(from, headSize)
	for range deepestCompression {
		inner, err := t.decompress()
		if err != nil {
			return err
		}
		if inner == nil {
			break
		}
		t.Reader = bufio.NewReaderSize(t.bounded(inner), headSize)
	}
	head, err := t.Peek(headSize)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if t.Archive = archiveOf(head); t.Archive != NoArchive {
		return nil
	}
	if bytes.HasPrefix(head, []byte("\xef\xbb\xbf")) {
		_, err := t.Discard(3)
		return err
	}
	if e := wideEncoding(head); e != nil {
		t.Reader = bufio.NewReaderSize(e.NewDecoder().Reader(t.Reader), headSize)
	}
	return nil
}

// decompress returns the text of a compressed file, or nil if the file is not compressed.
func (t *Text) decompress() (io.Reader, error) {
	head, err := t.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	for _, c := range compressions {
		if bytes.HasPrefix(head, []byte(c.magic)) {
			inner, err := c.open(t.Reader)
			switch {
			case isWindow(err):
				return nil, t.refuseWindow()
			case err != nil: // the first bytes were no more than that
				return nil, nil
			}
			return inner, nil
		}
	}
	return nil, nil
}

// limit is how many bytes may still be unpacked from a file.
type limit struct {
	left int64
	hint string // what to do with a file that has more
}

// bounded returns the bytes that are unpacked from the file, up to its limit.
func (t *Text) bounded(from io.Reader) io.Reader { return &unpacked{from, t} }

// isWindow reports whether a text refers farther back than is kept of it.
func isWindow(err error) bool {
	return errors.Is(err, xz.ErrMemlimit) || errors.Is(err, zstd.ErrWindowSizeExceeded)
}

func (t *Text) refuseWindow() error {
	return fault.File(t.Name()).Inputf("to decompress the file takes a window of more than %d MiB, the limit",
		largestWindow>>20).WithHint("decompress it with the program that has compressed it: " +
		"xz -dc FILE | plimsoll explain -, or zstd -dc --long=31 FILE | plimsoll explain -")
}

// unpacked ends a damaged or cut stream where it cannot be read any further. What comes before counts.
type unpacked struct {
	from io.Reader
	text *Text
}

func (u *unpacked) Read(to []byte) (int, error) {
	n, err := u.from.Read(to)
	u.text.limit.left -= int64(n)
	var refused *fault.Input
	switch {
	case u.text.limit.left < 0:
		return n, fault.File(u.text.Name()).Inputf("the file has more than %d bytes of text, the limit",
			int64(longestText)).WithHint(u.text.limit.hint)
	case isWindow(err):
		return n, u.text.refuseWindow()
	case err != nil && !errors.Is(err, io.EOF) && !errors.As(err, &refused):
		u.text.source.Cut = true
		err = io.EOF
	}
	return n, err
}

// wideEncoding returns the encoding of a text in units of two or four bytes, or nil. Without a byte order mark, the
// zeros of its Latin letters show the encoding.
func wideEncoding(head []byte) encoding.Encoding {
	switch {
	case bytes.HasPrefix(head, []byte("\xff\xfe\x00\x00")):
		return utf32.UTF32(utf32.LittleEndian, utf32.UseBOM)
	case bytes.HasPrefix(head, []byte("\xff\xfe")):
		return unicode.UTF16(unicode.LittleEndian, unicode.UseBOM)
	case bytes.HasPrefix(head, []byte("\xfe\xff")):
		return unicode.UTF16(unicode.BigEndian, unicode.UseBOM)
	}
	head = head[:min(len(head), 4096)&^1]
	zeros := [2]int{}
	for i, b := range head {
		if b == 0 {
			zeros[i&1]++
		}
	}
	switch most := len(head) / 10; { // of the bytes, half of which are at even places
	case most == 0:
		return nil
	case zeros[1] >= most && zeros[0] <= most/4:
		return unicode.UTF16(unicode.LittleEndian, unicode.IgnoreBOM)
	case zeros[0] >= most && zeros[1] <= most/4:
		return unicode.UTF16(unicode.BigEndian, unicode.IgnoreBOM)
	}
	return nil
}
