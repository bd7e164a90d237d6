package files

import "sync"

// revised has texts that are not written yet, by the paths of their files. Users' files name other files, which are
// read several calls away, so a caller cannot hand texts down. One revision is in force at a time.
var revised struct {
	sync.RWMutex
	texts map[string][]byte
}

var revising sync.Mutex

// Revised calls body while Read returns these texts in place of the files. Other callers of Revised wait.
func Revised(texts map[string][]byte, body func() error) error {
	revising.Lock()
	defer revising.Unlock()
	set := func(texts map[string][]byte) {
		revised.Lock()
		revised.texts = texts
		revised.Unlock()
	}
	set(texts)
	defer set(nil)
	return body()
}

// revision returns the text that stands for a file.
func revision(path string) ([]byte, bool) {
	revised.RLock()
	defer revised.RUnlock()
	text, found := revised.texts[path]
	return text, found
}
