// Package browser tests the pages of Plimsoll in headless Chromium. It is a module of its own, so that the program does
// not depend on what drives a browser.
package browser
