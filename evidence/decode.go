package evidence

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"compress/gzip"
	"errors"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
	"golang.org/x/text/encoding"
	"golang.org/x/text/encoding/unicode"
	"golang.org/x/text/encoding/unicode/utf32"

	"plimsoll/fault"
)

const (
	// headSize is how many bytes the reader looks at before it decides what a file is.
	headSize = 64 << 10
	// longestText is the limit of a decompressed text. A small compressed file can claim any size.
	longestText = 1 << 30
	// deepestCompression is how often a file may be compressed.
	deepestCompression = 3
	// largestWindow bounds the memory of zstd.
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
	{"\xfd7zXZ\x00", func(r io.Reader) (io.Reader, error) { return xz.NewReader(r) }},
}

// open returns the text of a file: decompressed, and in UTF-8 where it was UTF-16. Bytes that are no UTF-8 stay.
func (s *Source) open(from io.Reader) (*bufio.Reader, error) {
	text := bufio.NewReaderSize(from, headSize)
	for range deepestCompression {
		inner, err := decompress(text)
		if err != nil {
			return nil, err
		}
		if inner == nil {
			break
		}
		text = bufio.NewReaderSize(&decompressed{from: inner, source: s}, headSize)
	}
	head, err := text.Peek(headSize)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if bytes.HasPrefix(head, []byte("\xef\xbb\xbf")) {
		_, err := text.Discard(3)
		return text, err
	}
	if e := wideEncoding(head); e != nil {
		return bufio.NewReaderSize(e.NewDecoder().Reader(text), headSize), nil
	}
	return text, nil
}

// decompress returns the text of a compressed file, or nil if the file is not compressed.
func decompress(from *bufio.Reader) (io.Reader, error) {
	head, err := from.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	for _, c := range compressions {
		if bytes.HasPrefix(head, []byte(c.magic)) {
			inner, err := c.open(from)
			if err != nil { // the first bytes were no more than that
				return nil, nil
			}
			return inner, nil
		}
	}
	return nil, nil
}

// decompressed ends a damaged or cut stream where it cannot be read any further. What comes before counts.
type decompressed struct {
	from   io.Reader
	source *Source
	length int64
}

func (d *decompressed) Read(to []byte) (int, error) {
	n, err := d.from.Read(to)
	d.length += int64(n)
	switch {
	case d.length > longestText:
		at := fault.File(d.source.Name)
		return n, at.Inputf("the file has more than %d bytes of text, the limit", int64(longestText)).
			WithHint("give the end of the log: zcat FILE | tail -n 1000000")
	case err != nil && !errors.Is(err, io.EOF):
		d.source.Cut = true
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
