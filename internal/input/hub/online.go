//go:build !page

package hub

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
)

const (
	timeout   = 20 * time.Second
	maxConfig = 10_000_000
)

func get(name string) ([]byte, error) {
	endpoint := strings.TrimSuffix(first("HF_ENDPOINT"), "/")
	if endpoint == "" {
		endpoint = "https://huggingface.co"
	}
	unreachable := func(err error) error {
		var detail *url.Error
		if errors.As(err, &detail) { // its text repeats the address
			err = detail.Err
		}
		return &fault.Input{What: fmt.Sprintf("the hub did not answer for %s", name), Err: err,
			Hint: "check the network and HF_ENDPOINT, or name the model's config.json"}
	}
	request, err := http.NewRequest(http.MethodGet, endpoint+"/"+name+"/resolve/main/"+configName, nil)
	if err != nil {
		return nil, unreachable(err)
	}
	if t := token(); t != "" {
		request.Header.Set("Authorization", "Bearer "+t)
	}
	client := http.Client{Timeout: timeout, CheckRedirect: follow}
	response, err := client.Do(request)
	if err != nil {
		return nil, unreachable(err)
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusOK:
	case http.StatusUnauthorized, http.StatusForbidden:
		return nil, fault.Inputf("the hub does not show the config.json of %s to this user: status %d", name,
			response.StatusCode).WithHint("check the name, accept the model's terms on the hub, and set HF_TOKEN")
	case http.StatusNotFound:
		return nil, fault.Inputf("the hub has no config.json of %s", name).
			WithHint("check the name; a repository without config.json holds no model of transformers")
	default:
		return nil, fault.Inputf("the hub answered for %s with status %d", name, response.StatusCode).
			WithHint("try again later, or name the model's config.json")
	}
	text, err := io.ReadAll(io.LimitReader(response.Body, maxConfig+1))
	switch {
	case err != nil:
		return nil, unreachable(err)
	case len(text) > maxConfig:
		return nil, fault.Inputf("the hub's config.json of %s has more than %d bytes", name, maxConfig).
			WithHint("name the model's config.json")
	}
	return text, nil
}

// follow takes the token from a request that a redirect sends to another server. Go would send it to a subdomain,
// another port and without encryption, too.
func follow(next *http.Request, before []*http.Request) error {
	if len(before) >= 10 {
		return errors.New("it sent the request on ten times")
	}
	if from := before[0].URL; next.URL.Scheme != from.Scheme || next.URL.Host != from.Host {
		next.Header.Del("Authorization")
	}
	return nil
}

// token returns the user's token for the hub, or "".
func token() string {
	switch strings.ToLower(os.Getenv("HF_HUB_DISABLE_IMPLICIT_TOKEN")) {
	case "1", "on", "yes", "true":
		return ""
	}
	if t := first("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"); t != "" {
		return strings.TrimSpace(t)
	}
	file := os.Getenv("HF_TOKEN_PATH")
	if file == "" {
		file = filepath.Join(home(), "token")
	}
	text, err := files.Read(file, maxLine)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}
